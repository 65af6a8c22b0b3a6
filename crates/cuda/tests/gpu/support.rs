//! The device of the tests, random values and comparisons.

use std::path::PathBuf;
use std::sync::Arc;

use half::bf16;
use ringfence_cuda::CudaError;
use ringfence_cuda::driver::{Arena, Device, DevicePtr};
use ringfence_cuda::kernels::Kernels;
use ringfence_cuda::linear::{Format, Linear};
use ringfence_cuda::nvrtc::Compiler;
use ringfence_cuda::repack;

/// What a test says.
pub(crate) type Outcome = Result<(), String>;

/// A test by name.
pub(crate) type Test = (&'static str, fn(&Gpu) -> Outcome);

/// A device with all kernels.
pub(crate) struct Gpu {
    pub(crate) device: Device,
    pub(crate) kernels: Arc<Kernels>,
}

impl Gpu {
    /// The first device, kernels compiled into a cache beside the system's temporary files.
    pub(crate) fn open() -> Result<Self, CudaError> {
        let device = Device::open(0)?;
        let compiler = Compiler::find(&folders(), Some(kernel_cache()))?;
        let kernels = Arc::new(Kernels::load(&device, &compiler)?);
        Ok(Self { device, kernels })
    }

    /// Device memory of a test.
    pub(crate) fn memory(&self, bytes: usize) -> Result<Memory<'_>, CudaError> {
        let arena = self.device.arena("a test", bytes)?;
        // SAFETY: the arena is as long.
        unsafe { self.device.fill(arena.base(), 0xcd, arena.size()) }?;
        Ok(Memory { gpu: self, arena })
    }
}

/// Where the compiler may be beside the loader's path.
pub(crate) fn folders() -> Vec<PathBuf> {
    let folders = ["CUDA_HOME", "CUDA_PATH", "NVRTC_HOME"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    folders.chain([PathBuf::from("/usr/local/cuda")]).collect()
}

/// Where machine code is kept from one run to the next.
pub(crate) fn kernel_cache() -> PathBuf {
    std::env::temp_dir().join("ringfence-kernels")
}

/// Device memory that is filled from the host.
pub(crate) struct Memory<'a> {
    gpu: &'a Gpu,
    arena: Arena,
}

impl Memory<'_> {
    /// Room for `bytes` bytes, filled with 0xcd.
    pub(crate) fn room(&mut self, bytes: usize) -> Result<DevicePtr, CudaError> {
        self.arena.take("a test", bytes)
    }

    /// Values on the device.
    pub(crate) fn put<T: bytemuck::NoUninit>(&mut self, values: &[T]) -> Result<DevicePtr, CudaError> {
        let at = self.room(size_of_val(values))?;
        // SAFETY: the room is as long, and nothing runs.
        unsafe { self.gpu.device.upload(values, at) }?;
        Ok(at)
    }

    /// Values of the device.
    pub(crate) fn get<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(
        &self,
        at: DevicePtr,
        count: usize,
    ) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::zeroed(); count];
        // SAFETY: the tests ask for what they made room for.
        unsafe { self.gpu.device.download(at, &mut values) }?;
        Ok(values)
    }

    /// A matrix in the kernels' layout, from its stored codes and scales.
    pub(crate) fn matrix(
        &mut self,
        format: Format,
        (rows, cols): (usize, usize),
        codes: &[u8],
        scales: &[u8],
    ) -> Result<Linear, CudaError> {
        let at = (&*self.gpu.kernels, &**self.gpu.device.stream());
        let mut weight = self.put(codes)?;
        if repack::moves_codes(format) {
            let to = self.room(rows * format.row_bytes(cols))?;
            // SAFETY: both are as long as the shapes say.
            unsafe { repack::codes(at, format, (rows, cols), weight, to) }?;
            weight = to;
        }
        let mut scale = if scales.is_empty() { DevicePtr::NULL } else { self.put(scales)? };
        if format == Format::Fp4 {
            let to = self.room(format.scale_bytes(rows, cols))?;
            // SAFETY: both are as long as the shapes say.
            unsafe { repack::fp4_scales(at, (rows, cols), scale, to) }?;
            scale = to;
        }
        // Products may read weights before the kernel before them has ended.
        self.gpu.device.synchronize()?;
        Ok(Linear { format, rows, cols, weight, scale })
    }
}

/// Random values, the same in every run.
pub(crate) struct Rng(u64);

impl Rng {
    /// A sequence of its own for each seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
    }

    /// 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    /// A value in (−1, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// A value about a standard normal's size.
    pub(crate) fn normal(&mut self) -> f32 {
        (self.unit() + self.unit() + self.unit()) * 1.2
    }

    /// Rows of bf16 activations with the values that matter among them: zeros of both signs, ties
    /// of the quantizer, group maxima at its bounds, huge and tiny ones.
    pub(crate) fn activations(&mut self, count: usize) -> Vec<bf16> {
        let special = [
            0.0,
            -0.0,
            448.0,
            -448.0,
            280_576.0,
            -280_576.0,
            1e-30,
            17.0,
            18.0,
            -19.0,
            0.001_953_125,
            2.0f32.powi(-10),
        ];
        let mut x: Vec<bf16> = (0..count)
            .map(|_| match self.below(64) {
                0 => bf16::from_f32(special[self.below(special.len())]),
                1 => bf16::from_f32(self.unit() * 2.0f32.powi(self.below(40) as i32 - 30)),
                _ => bf16::from_f32(self.normal()),
            })
            .collect();
        // Some groups are all zero.
        for group in x.chunks_mut(128) {
            if self.below(16) == 0 {
                group.fill(bf16::ZERO);
            }
        }
        x
    }

    /// E4M3 codes that are numbers, subnormals and zeros among them.
    pub(crate) fn e4m3(&mut self, count: usize) -> Vec<u8> {
        (0..count)
            .map(|_| {
                let code = (self.next() >> 32) as u8;
                if code & 0x7f == 0x7f { code ^ 1 } else { code }
            })
            .collect()
    }

    /// E8M0 codes about 2^-10, a few far away.
    pub(crate) fn e8m0(&mut self, count: usize) -> Vec<u8> {
        (0..count)
            .map(|_| match self.below(200) {
                0 => [0, 1, 60, 200][self.below(4)],
                _ => 112 + self.below(12) as u8,
            })
            .collect()
    }

    /// Any bytes.
    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| (self.next() >> 32) as u8).collect()
    }
}

/// Compares bits; NaN equals NaN.
pub(crate) fn same_bf16(what: &str, got: &[bf16], expected: &[bf16]) -> Outcome {
    let same = |(g, e): (&bf16, &bf16)| g.to_bits() == e.to_bits() || g.is_nan() && e.is_nan();
    compare(what, got.len(), expected.len(), got.iter().zip(expected).map(same), |i| {
        format!("{:#06x} ({}) for {:#06x} ({})", got[i].to_bits(), got[i], expected[i].to_bits(), expected[i])
    })
}

/// Compares bits; NaN equals NaN.
pub(crate) fn same_f32(what: &str, got: &[f32], expected: &[f32]) -> Outcome {
    let same = |(g, e): (&f32, &f32)| g.to_bits() == e.to_bits() || g.is_nan() && e.is_nan();
    compare(what, got.len(), expected.len(), got.iter().zip(expected).map(same), |i| {
        format!("{:#010x} ({}) for {:#010x} ({})", got[i].to_bits(), got[i], expected[i].to_bits(), expected[i])
    })
}

fn compare(
    what: &str,
    got: usize,
    expected: usize,
    same: impl Iterator<Item = bool>,
    show: impl Fn(usize) -> String,
) -> Outcome {
    if got != expected {
        return Err(format!("{what}: {got} values for {expected}"));
    }
    let wrong: Vec<usize> = same.enumerate().filter(|(_, same)| !same).map(|(i, _)| i).collect();
    match wrong.first() {
        None => Ok(()),
        Some(&first) => Err(format!("{what}: {} of {got} differ, value {first} is {}", wrong.len(), show(first))),
    }
}

/// An error of the device as a test's words.
pub(crate) fn words<T>(result: Result<T, CudaError>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}
