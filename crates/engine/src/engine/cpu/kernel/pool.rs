//! A pool of worker threads that an engine owns, and the views that let them write side by side.
//!
//! Owns the only `unsafe` that is not vector code: the lifetime of a borrowed task while workers
//! run it, and disjoint columns of one buffer. Which thread runs which task is left open; tasks
//! write disjoint places, so results don't depend on it.

use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Turns a worker spins for new work before it sleeps: some tens of microseconds.
const SPINS: u32 = 2_000;
/// Most threads of a pool.
pub const THREADS_MAX: usize = 256;

/// A borrowed task, its lifetime erased; alive until `Pool::run` has seen every worker leave it.
#[derive(Clone, Copy)]
struct Task(*const (dyn Fn(usize) + Sync));

// SAFETY: the pointee is `Sync`, and `Pool::run` keeps it alive until every worker is done.
unsafe impl Send for Task {}

/// What the workers share.
struct Shared {
    /// The task and how many times it runs; `None` between jobs.
    job: Mutex<Option<(Task, usize)>>,
    wake: Condvar,
    /// Rises with every job; workers wait for it to move.
    generation: AtomicU64,
    /// Next index of the job.
    next: AtomicUsize,
    /// Workers that have taken the job, under its lock, and not finished it.
    running: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
}

/// Worker threads, stopped when the value is dropped. A pool of one thread has no worker: it runs
/// tasks where it is called.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

impl Pool {
    /// Starts a pool of `threads` threads, the caller's among them.
    ///
    /// # Errors
    /// What the system said when it refused a thread.
    ///
    /// # Panics
    /// If `threads` is 0 or above [`THREADS_MAX`].
    pub fn new(threads: usize) -> std::io::Result<Self> {
        assert!((1..=THREADS_MAX).contains(&threads), "a pool of {threads} threads");
        let shared = Arc::new(Shared {
            job: Mutex::new(None),
            wake: Condvar::new(),
            generation: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::with_capacity(threads - 1) };
        for number in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new().name(format!("engine-{number}")).spawn(move || shared.work())?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads that run tasks, the caller's among them.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0)` … `task(tasks − 1)`, each once, on any threads, and returns when all are done.
    ///
    /// # Panics
    /// If a task panics, after all are done.
    pub fn run(&mut self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || tasks <= 1 {
            for i in 0..tasks {
                task(i);
            }
            return;
        }
        // SAFETY: only the lifetime changes. A worker takes the task only under the lock and while
        // it is there; it is taken away below, and then every worker that has it is waited for.
        let erased = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(task)
        };
        let shared = &*self.shared;
        shared.next.store(0, Ordering::Relaxed);
        shared.panicked.store(false, Ordering::Relaxed);
        {
            // Workers look at the generation under the lock before they sleep: none misses it.
            let mut job = lock(&shared.job);
            *job = Some((Task(erased), tasks));
            shared.generation.fetch_add(1, Ordering::Release);
        }
        shared.wake.notify_all();
        shared.take_indices(Task(erased), tasks);
        // Whoever wakes from here on finds nothing to do.
        *lock(&shared.job) = None;
        let mut spins = 0u32;
        while shared.running.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        assert!(!shared.panicked.load(Ordering::Relaxed), "a task of the engine's pool panicked");
    }

    /// Splits the columns of `y` `[rows, n]` at multiples of `granule` into about as many pieces as
    /// there are threads and runs `task` on each.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub fn run_columns<T: Send>(&mut self, y: Columns<'_, T>, granule: usize, task: &(dyn Fn(Columns<'_, T>) + Sync)) {
        if self.workers.is_empty() {
            task(y);
            return;
        }
        let (granules, threads) = (y.range.len().div_ceil(granule), self.threads());
        let y = &y;
        self.run(threads.min(granules), &|i| {
            let cut = |i: usize| y.range.start + (granules * i / threads.min(granules) * granule).min(y.range.len());
            // SAFETY: tasks have different indices, so their column ranges are disjoint; and `y`
            // is borrowed for as long as they run.
            let piece = unsafe { y.piece(cut(i)..cut(i + 1)) };
            task(piece);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.generation.fetch_add(1, Ordering::Release);
        drop(lock(&self.shared.job));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches its tasks' panics, so there is nothing to learn from its end.
            drop(worker.join());
        }
    }
}

impl Shared {
    /// The life of a worker.
    fn work(&self) {
        let mut seen = 0;
        loop {
            seen = self.wait(seen);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let job = lock(&self.job);
            let Some((task, tasks)) = *job else { continue };
            self.running.fetch_add(1, Ordering::Relaxed);
            drop(job);
            self.take_indices(task, tasks);
            self.running.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits until the generation is past `seen`: spins for a while, then sleeps.
    fn wait(&self, seen: u64) -> u64 {
        for _ in 0..SPINS {
            let generation = self.generation.load(Ordering::Acquire);
            if generation != seen {
                return generation;
            }
            std::hint::spin_loop();
        }
        let mut guard = lock(&self.job);
        loop {
            let generation = self.generation.load(Ordering::Acquire);
            if generation != seen {
                return generation;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs indices of the job until none is left.
    fn take_indices(&self, task: Task, tasks: usize) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= tasks {
                return;
            }
            // SAFETY: `Pool::run` keeps the task alive until this thread is done with the job.
            let task = unsafe { &*task.0 };
            if catch_unwind(AssertUnwindSafe(|| task(index))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// Locks; a panic elsewhere leaves the value whole, so poison is no reason to stop.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Some columns of a row-major `[rows, n]` buffer, as one owner of them.
pub struct Columns<'a, T> {
    base: *mut T,
    rows: usize,
    stride: usize,
    range: Range<usize>,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut` to its columns, and no two values share a column.
unsafe impl<T: Send> Send for Columns<'_, T> {}
// SAFETY: a shared reference gives no access to the columns but through the unsafe `piece`.
unsafe impl<T: Send> Sync for Columns<'_, T> {}

impl<T> std::fmt::Debug for Columns<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Columns").field("rows", &self.rows).field("range", &self.range).finish_non_exhaustive()
    }
}

impl<'a, T> Columns<'a, T> {
    /// All columns of `[rows, n]`.
    ///
    /// # Panics
    /// If the buffer is not a whole number of rows.
    #[must_use]
    pub fn all(buffer: &'a mut [T], rows: usize) -> Self {
        assert!(rows > 0 && buffer.len().is_multiple_of(rows), "{} values in {rows} rows", buffer.len());
        let stride = buffer.len() / rows;
        Self { base: buffer.as_mut_ptr(), rows, stride, range: 0..stride, owner: PhantomData }
    }

    /// The columns held, as numbers in the whole buffer.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// How many rows there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The held columns of one row.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline(always)]
    pub fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row and the columns lie in the buffer.
        let first = unsafe { self.base.add(row * self.stride + self.range.start) };
        // SAFETY: this value is the one owner of its columns, and it is borrowed for the result.
        unsafe { std::slice::from_raw_parts_mut(first, self.range.len()) }
    }

    /// Splits into the columns below `column` and those from there on.
    ///
    /// # Panics
    /// If `column` lies outside the range.
    #[must_use]
    pub fn split_at(self, column: usize) -> (Self, Self) {
        let Range { start, end } = self.range;
        assert!((start..=end).contains(&column), "column {column} of {start}..{end}");
        // SAFETY: the two ranges are disjoint, and `self` ends here.
        let low = unsafe { self.piece(start..column) };
        // SAFETY: as above.
        let high = unsafe { self.piece(column..end) };
        (low, high)
    }

    /// Some of the columns.
    ///
    /// # Safety
    /// Whoever calls makes sure that no two live values hold the same column.
    unsafe fn piece(&self, range: Range<usize>) -> Self {
        assert!(range.start >= self.range.start && range.end <= self.range.end, "{range:?} of {:?}", self.range);
        Self { base: self.base, rows: self.rows, stride: self.stride, range, owner: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_threads() {
        for threads in [1, 2, 4] {
            let mut pool = Pool::new(threads).unwrap();
            for tasks in [0, 1, 2, 7, 100] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                for _ in 0..50 {
                    pool.run(tasks, &|i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                }
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 50));
            }
        }
    }

    #[test]
    fn columns_are_split_without_gap_or_overlap() {
        for threads in [1, 3, 4] {
            let mut pool = Pool::new(threads).unwrap();
            for n in [5, 16, 40, 97] {
                let mut y = vec![0u32; 3 * n];
                pool.run_columns(Columns::all(&mut y, 3), 16, &|mut part| {
                    assert!(part.range().start.is_multiple_of(16));
                    let start = part.range().start;
                    for row in 0..3 {
                        for (i, value) in part.row(row).iter_mut().enumerate() {
                            *value += (row * n + start + i) as u32 + 1;
                        }
                    }
                });
                assert!(y.iter().enumerate().all(|(i, &v)| v == i as u32 + 1));
            }
        }
    }

    #[test]
    fn a_panic_in_a_task_comes_back_and_leaves_the_pool_whole() {
        let mut pool = Pool::new(2).unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| pool.run(8, &|i| assert!(i != 3))));
        assert!(outcome.is_err());
        let count = AtomicUsize::new(0);
        pool.run(8, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 8);
    }
}
