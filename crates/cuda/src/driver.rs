//! One device: presence, context, stream, memory, launches.
//!
//! Owns every call of the driver that allocates or copies. A [`Device`] is a value: several in one
//! process share nothing. Memory is taken before the first step in few [`Arena`]s; no kernel of a
//! step allocates. One thread drives a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, result, sys};
use cudarc::nvrtc::Ptx;

use crate::error::{CudaError, Doing};

/// Every piece of an arena starts at a multiple of it.
pub const ALIGN: usize = 256;

/// A place in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// No place.
    pub const NULL: Self = Self(0);

    /// The place `bytes` further on.
    #[must_use]
    pub fn plus(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Which of the machine's devices.
    pub ordinal: usize,
    /// The vendor's name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// The driver's version as it says it, 13000 for 13.0.
    pub driver: i32,
    /// Multiprocessors.
    pub processors: u32,
    /// Most shared memory that a block may ask for, in bytes.
    pub shared_max: usize,
    /// All memory, in bytes.
    pub memory: u64,
}

/// A device with a context and a stream of its own.
#[derive(Debug)]
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    facts: DeviceFacts,
    taken: Arc<Taken>,
}

/// Bytes of a device's arenas.
#[derive(Debug, Default)]
struct Taken {
    now: AtomicU64,
    most: AtomicU64,
}

impl Taken {
    fn take(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.most.fetch_max(now, Ordering::Relaxed);
    }

    fn give(&self, bytes: usize) {
        self.now.fetch_sub(bytes as u64, Ordering::Relaxed);
    }
}

/// Whether the driver's library is on this machine.
#[must_use]
pub fn driver_present() -> bool {
    // SAFETY: opens libraries by the driver's own names and calls nothing in them.
    unsafe { sys::is_culib_present() }
}

impl Device {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`CudaError::Library`] without a driver, [`CudaError::Ordinal`] without such a device,
    /// [`CudaError::Capability`] for one that the kernels can't use, [`CudaError::Driver`].
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        if !driver_present() {
            let looked_for = "libcuda.so, libcuda.so.1 on the loader's path".to_owned();
            return Err(CudaError::Library { what: "NVIDIA driver", looked_for });
        }
        result::init().doing("initialize the driver")?;
        let found = usize::try_from(CudaContext::device_count().doing("count devices")?).unwrap_or(0);
        if ordinal >= found {
            return Err(CudaError::Ordinal { ordinal, found });
        }
        let context = CudaContext::new(ordinal).doing(format!("open cuda:{ordinal}"))?;
        // SAFETY: buffers are used on this device's stream, which orders them, and on a branch of it, which
        // events of its own order.
        unsafe { context.disable_event_tracking() };
        let facts = facts(&context, ordinal)?;
        let (major, minor) = facts.capability;
        if (major, minor) < (8, 9) {
            return Err(CudaError::Capability { ordinal, name: facts.name, major, minor });
        }
        let stream = context.new_stream().doing("make a stream")?;
        Ok(Self { context, stream, facts, taken: Arc::default() })
    }

    /// What the device is.
    #[must_use]
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// The device's stream: all work of an engine is ordered by it.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The device's context.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Makes the device the calling thread's.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().doing("bind the context")
    }

    /// Bytes free and in all.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (free, total) = self.context.mem_get_info().doing("ask for free memory")?;
        Ok((free as u64, total as u64))
    }

    /// Bytes that this value's arenas take now, and the most that they took at once.
    #[must_use]
    pub fn taken(&self) -> (u64, u64) {
        (self.taken.now.load(Ordering::Relaxed), self.taken.most.load(Ordering::Relaxed))
    }

    /// Takes `bytes` of device memory for `what`.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if less is free, [`CudaError::Driver`].
    pub fn arena(&self, what: &str, bytes: usize) -> Result<Arena, CudaError> {
        let bytes = bytes.next_multiple_of(ALIGN).max(ALIGN);
        self.context.bind_to_thread().doing("bind the context")?;
        let (free, _) = self.memory()?;
        if bytes as u64 > free {
            return Err(CudaError::Memory { what: what.to_owned(), needed: bytes as u64, free });
        }
        // SAFETY: the context is bound; the arena frees what it got, once.
        let base = unsafe { result::malloc_sync(bytes) }.doing(format!("allocate {bytes} bytes for {what}"))?;
        self.taken.take(bytes);
        Ok(Arena { context: self.context.clone(), taken: self.taken.clone(), base, size: bytes, used: 0 })
    }

    /// Takes `bytes` of page-locked host memory.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn pinned(&self, bytes: usize, direction: Direction) -> Result<Pinned, CudaError> {
        self.context.bind_to_thread().doing("bind the context")?;
        let flags = match direction {
            Direction::ToDevice => sys::CU_MEMHOSTALLOC_WRITECOMBINED,
            Direction::FromDevice => 0,
        };
        // SAFETY: the context is bound; the buffer frees what it got, once.
        let base = unsafe { result::malloc_host(bytes.max(1), flags) }.doing("allocate page-locked memory")?;
        let base = base.cast::<u8>();
        // SAFETY: `base` is `bytes` long and nobody else's.
        unsafe { std::ptr::write_bytes(base, 0, bytes) };
        Ok(Pinned { context: self.context.clone(), base, size: bytes })
    }

    /// Loads compiled kernels.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn module(&self, file: &str, cubin: Vec<u8>) -> Result<Arc<CudaModule>, CudaError> {
        self.context.load_module(Ptx::from_binary(cubin)).doing(format!("load kernels {file}"))
    }

    /// Copies host values to `to` and waits until they are there.
    ///
    /// # Safety
    /// `to` must have room for them, and no kernel in flight may use that room.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub unsafe fn upload<T: bytemuck::NoUninit>(&self, values: &[T], to: DevicePtr) -> Result<(), CudaError> {
        self.context.bind_to_thread().doing("bind the context")?;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        // Ordered by the stream: the driver's synchronous copy may return before the bytes are there.
        // SAFETY: the caller's promise; the values live until the stream was waited for.
        unsafe { result::memcpy_htod_async(to.0, bytes, self.stream.cu_stream()) }.doing("copy to the device")?;
        self.synchronize()
    }

    /// Waits for the stream and copies `values.len()` values from `from`.
    ///
    /// # Safety
    /// `from` must hold as many values.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub unsafe fn download<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(
        &self,
        from: DevicePtr,
        values: &mut [T],
    ) -> Result<(), CudaError> {
        self.synchronize()?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtoh_sync(bytes, from.0) }.doing("copy from the device")
    }

    /// Sets `bytes` bytes to `value`, ordered by the stream.
    ///
    /// # Safety
    /// `at` must have as many bytes.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub unsafe fn fill(&self, at: DevicePtr, value: u8, bytes: usize) -> Result<(), CudaError> {
        self.context.bind_to_thread().doing("bind the context")?;
        // SAFETY: the caller's promise.
        unsafe { result::memset_d8_async(at.0, value, bytes, self.stream.cu_stream()) }.doing("fill device memory")
    }

    /// Waits until all work of the stream is done.
    ///
    /// # Errors
    /// [`CudaError::Driver`]: also what an earlier kernel did wrong.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize().doing("wait for the device")
    }
}

fn facts(context: &Arc<CudaContext>, ordinal: usize) -> Result<DeviceFacts, CudaError> {
    use sys::CUdevice_attribute as Attribute;
    let ask = |attribute| context.attribute(attribute).doing("ask the device");
    let mut driver = 0;
    // SAFETY: writes one integer.
    unsafe { sys::cuDriverGetVersion(&raw mut driver) }.result().doing("ask the driver's version")?;
    Ok(DeviceFacts {
        ordinal,
        name: context.name().doing("ask the device's name")?,
        capability: context.compute_capability().doing("ask the compute capability")?,
        driver,
        processors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs(),
        shared_max: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?.unsigned_abs() as usize,
        memory: context.total_mem().doing("ask the memory")? as u64,
    })
}

/// A stretch of device memory that is handed out in pieces and freed as a whole.
#[derive(Debug)]
pub struct Arena {
    context: Arc<CudaContext>,
    taken: Arc<Taken>,
    base: sys::CUdeviceptr,
    size: usize,
    used: usize,
}

impl Arena {
    /// The next `bytes` bytes, aligned to [`ALIGN`].
    ///
    /// # Errors
    /// [`CudaError::Memory`] if the arena is used up.
    pub fn take(&mut self, what: &str, bytes: usize) -> Result<DevicePtr, CudaError> {
        let free = self.size - self.used;
        let step = bytes.next_multiple_of(ALIGN);
        if step > free {
            return Err(CudaError::Memory { what: what.to_owned(), needed: bytes as u64, free: free as u64 });
        }
        let at = self.base + self.used as u64;
        self.used += step;
        Ok(DevicePtr(at))
    }

    /// Forgets all pieces; for scratch that is laid out anew.
    pub fn reset(&mut self) {
        self.used = 0;
    }

    /// Where it starts.
    #[must_use]
    pub fn base(&self) -> DevicePtr {
        DevicePtr(self.base)
    }

    /// Bytes in all.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Bytes handed out.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: `base` was allocated in this context and is freed here only; the driver waits
            // for kernels that use it.
            let freed = unsafe { result::free_sync(self.base) };
            self.context.record_err(freed);
            self.taken.give(self.size);
        }
    }
}

/// What a page-locked buffer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Written here, read by the device; slow to read here.
    ToDevice,
    /// Written by the device, read here.
    FromDevice,
}

/// Page-locked host memory.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<CudaContext>,
    base: *mut u8,
    size: usize,
}

// SAFETY: the memory belongs to the value alone.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `base` is `size` initialized bytes of this value.
        unsafe { std::slice::from_raw_parts(self.base, self.size) }
    }

    /// Its bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `base` is `size` initialized bytes of this value.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.size) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: `base` was allocated in this context and is freed here only.
            let freed = unsafe { result::free_host(self.base.cast()) };
            self.context.record_err(freed);
        }
    }
}

/// How a kernel is launched: it takes one parameter, a `#[repr(C)]` value.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The kernel.
    pub function: &'a CudaFunction,
    /// Blocks.
    pub grid: (u32, u32, u32),
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block in bytes; see [`allow_shared`].
    pub shared: u32,
    /// May start before the kernel before it ends: the kernel waits itself (`wait_for_inputs`).
    pub dependent: bool,
}

impl Launch<'_> {
    /// Adds the kernel to the stream.
    ///
    /// # Safety
    /// `params` must be the kernel's parameter, and every place in it must be valid for what the
    /// kernel does there until it has run.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub unsafe fn run<P: Copy>(&self, stream: &CudaStream, params: &P) -> Result<(), CudaError> {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid.0,
            gridDimY: self.grid.1,
            gridDimZ: self.grid.2,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: stream.cu_stream(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(self.dependent),
        };
        let mut args = [std::ptr::from_ref(params).cast_mut().cast::<std::ffi::c_void>()];
        // SAFETY: the configuration and the one argument live through the call, which copies them;
        // the rest is the caller's promise.
        let status = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function.cu_function(),
                args.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        status.result().doing("launch a kernel")
    }
}

/// Lets a kernel take `bytes` of dynamic shared memory.
///
/// # Errors
/// [`CudaError::Driver`] if the device has less.
pub fn allow_shared(function: &CudaFunction, bytes: usize) -> Result<(), CudaError> {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    function.set_attribute(attribute, bytes).doing(format!("ask for {bytes} bytes of shared memory"))
}
