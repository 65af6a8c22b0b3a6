//! How many stages share a model's layers, and which each holds: pure.

use crate::ids::LayerRange;

/// A number of stages that the model can't be cut into.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TilingError {
    /// No stage, or more stages than layers.
    #[error("--stages {asked}: this model has {layers} layers, so expected 1 to {layers}")]
    Count {
        /// Stages asked for.
        asked: u16,
        /// Layers of the model.
        layers: u16,
    },
    /// The last stage must hold the layers that the drafter taps.
    #[error(
        "--stages {asked}: the drafter taps layers {taps:?}, which one stage, the tail, must hold; \
         the layers before them make {most} stages at most in pipelined mode (or use --mode plain)"
    )]
    Taps {
        /// Stages asked for.
        asked: u16,
        /// Layers that the drafter taps.
        taps: Vec<u16>,
        /// Stages at most.
        most: u16,
    },
}

/// Cuts `layers` layers into `stages` ranges; with `taps`, the last range holds them all.
///
/// # Errors
/// [`TilingError`] says what is possible.
pub fn tile(layers: u16, stages: u16, taps: Option<&[u16]>) -> Result<Vec<LayerRange>, TilingError> {
    if stages == 0 || stages > layers {
        return Err(TilingError::Count { asked: stages, layers });
    }
    let even = layers - layers / stages.max(1);
    let tail = match taps.and_then(|taps| taps.iter().min().map(|first| (taps, *first))) {
        Some((taps, first)) => {
            let most = first.saturating_add(1);
            if stages > most {
                return Err(TilingError::Taps { asked: stages, taps: taps.to_vec(), most });
            }
            first.min(even)
        }
        None => even,
    };
    let front = stages - 1;
    let tail = if front == 0 { 0 } else { tail.max(front) };
    let mut ranges = Vec::with_capacity(usize::from(stages));
    for at in 0..front {
        let cut = |at: u16| u16::try_from(u32::from(tail) * u32::from(at) / u32::from(front)).unwrap_or(tail);
        ranges.extend(LayerRange::new(cut(at), cut(at + 1)));
    }
    ranges.extend(LayerRange::new(tail, layers));
    Ok(ranges)
}

/// Cuts for plain decoding: where the tail can hold every tap the cut is that of pipelined mode, so
/// that both modes have the same boundaries and so the same tokens.
///
/// # Errors
/// [`TilingError::Count`].
pub fn tile_plain(layers: u16, stages: u16, taps: Option<&[u16]>) -> Result<Vec<LayerRange>, TilingError> {
    match tile(layers, stages, taps) {
        Err(TilingError::Taps { .. }) => tile(layers, stages, None),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiled(layers: u16, stages: u16, taps: Option<&[u16]>) -> String {
        match tile(layers, stages, taps) {
            Ok(ranges) => ranges.iter().map(LayerRange::to_string).collect::<Vec<_>>().join(" "),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn the_tail_holds_every_tap() {
        let taps = Some(&[4, 5, 6][..]);
        assert_eq!(tiled(7, 1, taps), "0:7");
        assert_eq!(tiled(7, 2, taps), "0:4 4:7");
        assert_eq!(tiled(7, 3, taps), "0:2 2:4 4:7");
        assert_eq!(tiled(7, 5, taps), "0:1 1:2 2:3 3:4 4:7");
        assert!(tiled(7, 6, taps).contains("taps layers [4, 5, 6]"), "{}", tiled(7, 6, taps));
        assert_eq!(tiled(43, 3, Some(&[40, 41, 42])), "0:14 14:29 29:43");
    }

    #[test]
    fn plain_cuts_as_pipelined_does_while_the_tail_can_hold_the_taps() {
        let taps = Some(&[4, 5, 6][..]);
        for stages in 1..=5 {
            assert_eq!(tile_plain(7, stages, taps), tile(7, stages, taps));
        }
        assert_eq!(tile_plain(7, 7, taps), tile(7, 7, None));
        assert!(tile_plain(7, 8, taps).is_err());
    }

    #[test]
    fn plain_stages_go_down_to_a_layer_each() {
        assert_eq!(tiled(7, 7, None), "0:1 1:2 2:3 3:4 4:5 5:6 6:7");
        assert_eq!(tiled(7, 3, None), "0:2 2:5 5:7");
        for stages in 1..=7 {
            let ranges = tile(7, stages, None).unwrap();
            assert_eq!(ranges.len(), usize::from(stages));
            assert!(ranges.windows(2).all(|pair| pair[0].hi() == pair[1].lo()));
            assert_eq!((ranges[0].lo(), ranges[ranges.len() - 1].hi()), (0, 7));
        }
        assert!(tiled(7, 8, None).contains("1 to 7"));
        assert!(tiled(7, 0, None).contains("1 to 7"));
    }
}
