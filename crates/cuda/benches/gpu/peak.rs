//! The most device memory that is in use while something else happens.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::CudaContext;
use ringfence_cuda::driver::Device;

/// Time between two samples.
const PAUSE: Duration = Duration::from_micros(500);

/// What was in use, in bytes beside what was before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Used {
    pub(crate) steady: u64,
    pub(crate) peak: u64,
    pub(crate) samples: u64,
}

/// Asks the driver again and again how much is free.
pub(crate) struct Sampler {
    context: Arc<CudaContext>,
    before: u64,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

struct Shared {
    least: AtomicU64,
    samples: AtomicU64,
    done: AtomicBool,
}

fn free(context: &CudaContext) -> Result<u64, String> {
    context.mem_get_info().map(|(free, _)| free as u64).map_err(|error| error.to_string())
}

impl Sampler {
    /// Starts with what is in use now.
    ///
    /// # Errors
    /// The driver's words.
    pub(crate) fn start(device: &Device) -> Result<Self, String> {
        let context = device.context().clone();
        let before = free(&context)?;
        let shared = Arc::new(Shared {
            least: AtomicU64::new(before),
            samples: AtomicU64::new(0),
            done: AtomicBool::new(false),
        });
        let (sampled, asked) = (Arc::clone(&shared), context.clone());
        let thread = std::thread::spawn(move || {
            while !sampled.done.load(Ordering::Relaxed) {
                if let Ok(free) = free(&asked) {
                    sampled.least.fetch_min(free, Ordering::Relaxed);
                    sampled.samples.fetch_add(1, Ordering::Relaxed);
                }
                std::thread::sleep(PAUSE);
            }
        });
        Ok(Self { context, before, shared, thread })
    }

    /// What is in use now, and the most that was.
    ///
    /// # Errors
    /// The driver's words.
    pub(crate) fn stop(self) -> Result<Used, String> {
        self.shared.done.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| "the sampling thread ended")?;
        let now = free(&self.context)?;
        let least = self.shared.least.load(Ordering::Relaxed).min(now);
        Ok(Used {
            steady: self.before.saturating_sub(now),
            peak: self.before.saturating_sub(least),
            samples: self.shared.samples.load(Ordering::Relaxed),
        })
    }
}
