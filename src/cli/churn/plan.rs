//! Which faults strike, where and when: pure, and the same for the same seed.

use std::fmt;

use clap::ValueEnum;

/// What happens to a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// SIGKILL: the process is gone at once
    Kill,
    /// SIGSTOP: it says nothing more; it is let go on after the heal, and must harm nothing
    Freeze,
    /// The hop into it loses every packet, one way or both
    Cut,
    /// It computes a fifth of the time: it must be waited for, not replaced
    Slow,
    /// SIGKILL of the coordinator, wherever the place is; another one goes on from its log
    Coordinator,
}

/// Whom it strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Place {
    /// The first stage of the ring
    Head,
    /// A stage between the first and the last
    Middle,
    /// The last stage
    Tail,
    /// A stage that waits outside the ring
    Spare,
    /// Any of these
    Random,
}

/// When it strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Moment {
    /// While the prompt is computed
    Prefill,
    /// While tokens come and frames are in flight
    Decode,
    /// After a draft was rejected, before the answer to its correction
    Correction,
    /// While the ring heals from the death of another stage
    Heal,
    /// While nobody asks
    Idle,
}

impl Fault {
    /// Every fault.
    const ALL: [Self; 5] = [Self::Kill, Self::Freeze, Self::Cut, Self::Slow, Self::Coordinator];
}

impl Place {
    /// Every place.
    const ALL: [Self; 5] = [Self::Head, Self::Middle, Self::Tail, Self::Spare, Self::Random];
}

impl Moment {
    /// Every moment.
    const ALL: [Self; 5] = [Self::Prefill, Self::Decode, Self::Correction, Self::Heal, Self::Idle];
}

macro_rules! named {
    ($($kind:ty),*) => {$(
        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                // No variant is skipped, so each has a name.
                f.pad(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
            }
        }
    )*};
}
named!(Fault, Place, Moment);

/// Numbers that look random: splitmix64.
#[derive(Debug, Clone)]
pub(crate) struct Draw(u64);

impl Draw {
    /// Numbers that depend on a seed alone.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `count`; 0 where that is 0.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        usize::try_from(self.next() % (count.max(1) as u64)).unwrap_or(0)
    }

    /// One of these.
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        of.get(self.below(of.len())).copied()
    }
}

/// What was chosen on the command line.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Choice {
    pub(crate) fault: Option<Fault>,
    pub(crate) place: Option<Place>,
    pub(crate) moment: Option<Moment>,
}

/// One strike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trial {
    pub(crate) fault: Fault,
    pub(crate) place: Place,
    pub(crate) moment: Moment,
    /// Of everything else that is drawn.
    pub(crate) seed: u64,
}

/// The strikes of one repeat: what is not chosen goes through all faults and places, and the moment is
/// drawn.
pub(crate) fn trials(choice: Choice, seed: u64) -> Vec<Trial> {
    let mut draw = Draw::new(seed);
    let faults = choice.fault.map_or_else(|| Fault::ALL.to_vec(), |fault| vec![fault]);
    let places = choice.place.map_or_else(|| Place::ALL.to_vec(), |place| vec![place]);
    let mut trials = Vec::new();
    for fault in faults {
        for place in &places {
            let drawn = Moment::ALL[draw.below(Moment::ALL.len())];
            let moment = choice.moment.unwrap_or(drawn);
            trials.push(Trial { fault, place: *place, moment, seed: draw.next() });
        }
    }
    trials
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_choice_every_fault_meets_every_place_once() {
        let all = trials(Choice::default(), 7);
        assert_eq!(all, trials(Choice::default(), 7), "a seed replays");
        assert_ne!(all, trials(Choice::default(), 8));
        let pairs: Vec<String> = all.iter().map(|trial| format!("{} {}", trial.fault, trial.place)).collect();
        assert_eq!(pairs.len(), 25);
        assert_eq!((pairs[0].as_str(), pairs[24].as_str()), ("kill head", "coordinator random"));
        let mut moments: Vec<String> =
            (0..20).flat_map(|seed| trials(Choice::default(), seed)).map(|trial| trial.moment.to_string()).collect();
        moments.sort();
        moments.dedup();
        assert_eq!(moments, ["correction", "decode", "heal", "idle", "prefill"]);
    }

    #[test]
    fn what_is_chosen_is_not_drawn() {
        let choice = Choice { fault: Some(Fault::Cut), place: None, moment: Some(Moment::Idle) };
        let trials = trials(choice, 1);
        assert_eq!(trials.len(), 5);
        assert!(trials.iter().all(|trial| trial.fault == Fault::Cut && trial.moment == Moment::Idle));
    }

    #[test]
    fn numbers_keep_below_their_bound() {
        let mut draw = Draw::new(0);
        assert_eq!(draw.next(), 0xe220_a839_7b1d_cdaf, "the first number of splitmix64");
        assert!((0..1000).all(|_| draw.below(7) < 7));
        assert_eq!((draw.below(0), draw.pick::<u8>(&[])), (0, None));
    }
}
