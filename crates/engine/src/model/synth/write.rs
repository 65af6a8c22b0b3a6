//! Shards to disk by several threads, piece by piece.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::fill::{Fill, PIECE};
use super::{Plan, Shard, io, tensor_seed};
use crate::model::ModelError;
use crate::model::config::ModelConfig;

/// A small file.
pub(super) fn text(path: &Path, bytes: &[u8]) -> Result<(), ModelError> {
    std::fs::write(path, bytes).map_err(|error| io(path, &error))
}

/// One piece of a tensor.
struct Piece<'a> {
    shard: usize,
    fill: &'a Fill,
    number: u64,
    at: u64,
    len: usize,
}

/// All shards, several pieces at a time.
pub(super) fn shards(plan: &Plan<'_>, config: &ModelConfig, shards: &[Shard], dir: &Path) -> Result<(), ModelError> {
    let mut files = Vec::new();
    let mut fills = Vec::new();
    for shard in shards {
        let path = dir.join(&shard.file);
        let file = File::create(&path).map_err(|error| io(&path, &error))?;
        let mut head = (shard.header.len() as u64).to_le_bytes().to_vec();
        head.extend_from_slice(&shard.header);
        file.write_all_at(&head, 0).map_err(|error| io(&path, &error))?;
        files.push((path, file, head.len() as u64));
        fills.push(
            shard
                .tensors
                .iter()
                .map(|(spec, _)| Fill::new(spec, config, tensor_seed(plan.seed, &spec.name)))
                .collect::<Vec<_>>(),
        );
    }
    let mut pieces = Vec::new();
    for (number, shard) in shards.iter().enumerate() {
        for ((spec, place), fill) in shard.tensors.iter().zip(&fills[number]) {
            let bytes = usize::try_from(spec.bytes()).unwrap_or(usize::MAX);
            for (piece, from) in (0..bytes).step_by(PIECE).enumerate() {
                let at = files[number].2 + place + from as u64;
                pieces.push(Piece { shard: number, fill, number: piece as u64, at, len: PIECE.min(bytes - from) });
            }
        }
    }
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<ModelError>> = Mutex::new(None);
    let work = || {
        let mut buffer = vec![0; PIECE];
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let bytes = &mut buffer[..piece.len];
            piece.fill.piece(piece.number, bytes);
            let (path, file, _) = &files[piece.shard];
            if let Err(error) = file.write_all_at(bytes, piece.at) {
                next.store(pieces.len(), Ordering::Relaxed);
                *failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(io(path, &error));
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..plan.threads.max(1) {
            scope.spawn(work);
        }
    });
    match failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
