//! The device of the measurements and its clock.

use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::sys;
use ringfence_cuda::CudaError;
use ringfence_cuda::driver::{Device, DevicePtr};
use ringfence_cuda::kernels::Kernels;
use ringfence_cuda::nvrtc::Compiler;
use ringfence_cuda::repack;

/// Replays of a graph whose median counts.
const REPLAYS: usize = 15;

/// A device, its kernels and what a copy reaches there.
pub(crate) struct Bench {
    pub(crate) device: Device,
    pub(crate) kernels: Arc<Kernels>,
    /// Bytes read and written by a device-to-device copy, in GB/s.
    pub(crate) copy: f64,
    filters: Vec<String>,
}

impl Bench {
    pub(crate) fn open(filters: Vec<String>) -> Result<Self, CudaError> {
        let device = Device::open(0)?;
        let compiler = Compiler::find(&folders(), Some(std::env::temp_dir().join("ringfence-kernels")))?;
        let kernels = Arc::new(Kernels::load(&device, &compiler)?);
        let copy = copy_bandwidth(&device, &kernels)?;
        Ok(Self { device, kernels, copy, filters })
    }

    /// Whether a measurement was asked for.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|filter| name.contains(filter.as_str()))
    }

    /// Median microseconds of all that `work` adds to the stream, as a graph.
    pub(crate) fn time(&self, work: impl Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        time(&self.device, work)
    }
}

/// Where the compiler may be beside the loader's path.
pub(crate) fn folders() -> Vec<PathBuf> {
    let folders = ["CUDA_HOME", "CUDA_PATH", "NVRTC_HOME"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    folders.chain([PathBuf::from("/usr/local/cuda")]).collect()
}

fn driver<T>(doing: &str, result: Result<T, cudarc::driver::DriverError>) -> Result<T, CudaError> {
    result.map_err(|error| CudaError::Driver { doing: doing.to_owned(), why: error.to_string() })
}

fn time(device: &Device, work: impl Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
    let stream = device.stream();
    work()?;
    device.synchronize()?;
    driver("begin a capture", stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))?;
    work()?;
    let graph = driver("end a capture", stream.end_capture(sys::CUgraphInstantiate_flags(0)))?
        .ok_or_else(|| CudaError::Driver { doing: "end a capture".to_owned(), why: "no graph".to_owned() })?;
    let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let context = device.context();
    let (start, end) = (driver("event", context.new_event(flags))?, driver("event", context.new_event(flags))?);
    let mut times = Vec::new();
    for _ in 0..REPLAYS + 2 {
        driver("event", start.record(stream))?;
        driver("replay", graph.launch())?;
        driver("event", end.record(stream))?;
        times.push(f64::from(driver("event", start.elapsed_ms(&end))?) * 1e3);
    }
    let mut times = times.split_off(2);
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// The better of the driver's copy and a copying kernel.
fn copy_bandwidth(device: &Device, kernels: &Kernels) -> Result<f64, CudaError> {
    let bytes = 4 << 30;
    let (from, to) = (device.arena("a copy", bytes)?, device.arena("a copy", bytes)?);
    // SAFETY: the arena is as long.
    unsafe { device.fill(from.base(), 0x5a, bytes) }?;
    let (DevicePtr(from_at), DevicePtr(to_at)) = (from.base(), to.base());
    let by_driver = time(device, || {
        // SAFETY: both arenas are as long and apart.
        let copied =
            unsafe { cudarc::driver::result::memcpy_dtod_async(to_at, from_at, bytes, device.stream().cu_stream()) };
        driver("copy", copied)
    })?;
    let by_kernel = time(device, || {
        // SAFETY: both arenas are as long and apart.
        unsafe { repack::copy((kernels, device.stream()), from.base(), to.base(), bytes) }
    })?;
    println!("copy: driver {:.0} GB/s, kernel {:.0} GB/s", rate(bytes, by_driver), rate(bytes, by_kernel));
    Ok(rate(bytes, by_driver.min(by_kernel)))
}

fn rate(bytes: usize, us: f64) -> f64 {
    2.0 * bytes as f64 / us / 1e3
}
