//! What an engine puts on its stream: waves, more logits, drafts; captured or one kernel after the other.

use ringfence_engine::engine::{Engine, SessionShape};
use ringfence_engine::ids::{SessionId, WireEncoding};

use super::{CudaEngine, to_u32};
use crate::error::CudaError;
use crate::graph::{Captured, Graphs, ROWS};
use crate::ops::Row;
use crate::pass::{FEW, Shape};
use crate::state::{to_i32, to_usize};
use crate::transfer;

impl CudaEngine {
    /// Captures the waves of common shapes and the draft, as far as `budget` bytes go.
    pub(super) fn capture(&mut self, budget: u64) -> Result<(), CudaError> {
        if budget == 0 {
            return Ok(());
        }
        // The first launch of a kernel may load it, which can't be captured: all run once before.
        let session = SessionId(u64::MAX);
        let drafting = self.facts.draft_block > 0;
        let positions = to_u32(ROWS[ROWS.len() - 1]).min(self.facts.max_context);
        let shape = SessionShape {
            positions,
            reach: positions,
            boundaries: Vec::new(),
            encoding: WireEncoding::Bf16,
            drafting,
        };
        self.try_open(session, &shape)?;
        let (free, _) = self.device.memory()?;
        let result = self.capture_all(free, budget, positions);
        self.close(session);
        result
    }

    fn capture_all(&mut self, free: u64, budget: u64, positions: u32) -> Result<(), CudaError> {
        let drafting = self.facts.draft_block > 0;
        for rows in ROWS.into_iter().filter(|&rows| rows <= to_usize(positions)) {
            let logits = if self.facts.is_tail() { rows } else { 0 };
            let shape = Shape { rows, logits, drafting };
            let all: Vec<Row> = (0..rows).map(|pos| Row { pos: to_i32(pos), ..Row::default() }).collect();
            let picks: Vec<i32> = (0..logits).map(to_i32).collect();
            transfer::rows(&mut self.input, &all, &picks);
            self.enqueue(shape)?;
            self.device.synchronize()?;
            let graph = Captured::new(&self.device, &mut || self.enqueue(shape))?;
            if self.graphs.keep(&self.device, Some(shape), graph, free)? > budget {
                return Ok(());
            }
        }
        if drafting {
            transfer::anchor(&mut self.input, Row::default());
            self.enqueue_draft()?;
            self.device.synchronize()?;
            let graph = Captured::new(&self.device, &mut || self.enqueue_draft())?;
            self.graphs.keep(&self.device, None, graph, free)?;
        }
        Ok(())
    }

    /// Puts a wave on the stream: its inputs, its kernels, its outputs.
    pub(crate) fn enqueue(&self, shape: Shape) -> Result<(), CudaError> {
        let (b, width) = (&self.buffers, self.config.hc * self.config.dim);
        let copies = transfer::Copies { stream: self.device.stream(), input: &self.input, output: &self.output };
        copies.to_device(transfer::ROWS, b.rows, 16 * shape.rows)?;
        copies.to_device(transfer::LOGIT_ROWS, b.logit_rows, 4 * shape.logits)?;
        if !self.facts.is_head() {
            copies.to_device(transfer::HIDDEN, b.hidden, 2 * shape.rows * width)?;
        }
        // SAFETY: the buffer is that long.
        unsafe { self.device.fill(b.checks, 0, 4 * shape.rows) }?;
        self.pass().wave(shape)?;
        copies.to_host(b.checks, transfer::CHECKS, 4 * shape.rows)?;
        if self.facts.is_tail() {
            copies.to_host(b.logits, transfer::RESULT, 4 * shape.logits * self.config.vocab)
        } else {
            copies.to_host(b.hidden, transfer::RESULT, 2 * shape.rows * width)
        }
    }

    /// Puts the logits of more of the last wave's rows on the stream: `n` of those asked for, from the
    /// `from`-th on; the wave has `rows` rows.
    pub(super) fn enqueue_logits(&self, from: usize, n: usize, rows: usize) -> Result<(), CudaError> {
        let b = &self.buffers;
        let copies = transfer::Copies { stream: self.device.stream(), input: &self.input, output: &self.output };
        copies.to_device(transfer::LOGIT_ROWS + 4 * from, b.logit_rows.plus(4 * from), 4 * n)?;
        self.pass().logits(from, n)?;
        copies.to_host(b.checks, transfer::CHECKS, 4 * rows)?;
        copies.to_host(b.logits, transfer::RESULT, 4 * n * self.config.vocab)
    }

    /// Puts a draft on the stream.
    pub(super) fn enqueue_draft(&self) -> Result<(), CudaError> {
        let (b, block) = (&self.buffers, to_usize(self.facts.draft_block));
        let copies = transfer::Copies { stream: self.device.stream(), input: &self.input, output: &self.output };
        copies.to_device(transfer::ANCHOR, b.anchor, 16)?;
        // SAFETY: the buffer is that long.
        unsafe { self.device.fill(b.checks, 0, 4 * block) }?;
        self.pass().draft(block)?;
        copies.to_host(b.checks, transfer::CHECKS, 4 * block)?;
        copies.to_host(b.drafted, transfer::DRAFTED, 8 * FEW)
    }

    /// Forgets what was captured: from now on every wave is launched kernel by kernel.
    pub fn forget_graphs(&mut self) {
        self.graphs = Graphs::default();
    }

    /// Puts the rows and hidden states of the last wave into their buffers again, for measurements.
    pub(crate) fn put_last(&self, rows: usize) -> Result<(), CudaError> {
        let (b, width) = (&self.buffers, self.config.hc * self.config.dim);
        let copies = transfer::Copies { stream: self.device.stream(), input: &self.input, output: &self.output };
        copies.to_device(transfer::ROWS, b.rows, 16 * rows)?;
        match self.weights.embedding {
            Some(embedding) if self.facts.is_head() => {
                let pass = self.pass();
                pass.ops.embed((b.rows, rows), embedding, &pass.streams, b.hidden)
            }
            _ => copies.to_device(transfer::HIDDEN, b.hidden, 2 * rows * width),
        }
    }

    /// Puts rows into their buffer, for measurements.
    pub(crate) fn put_rows(&mut self, rows: &[Row]) -> Result<(), CudaError> {
        self.device.bind()?;
        transfer::rows(&mut self.input, rows, &[]);
        let copies = transfer::Copies { stream: self.device.stream(), input: &self.input, output: &self.output };
        copies.to_device(transfer::ROWS, self.buffers.rows, 16 * rows.len())?;
        self.device.synchronize()
    }

    /// Puts an anchor into its buffer, for measurements.
    pub(crate) fn put_anchor(&mut self, anchor: Row) -> Result<(), CudaError> {
        self.device.bind()?;
        transfer::anchor(&mut self.input, anchor);
        let copies = transfer::Copies { stream: self.device.stream(), input: &self.input, output: &self.output };
        copies.to_device(transfer::ANCHOR, self.buffers.anchor, 16)?;
        self.device.synchronize()
    }
}
