//! Why a device can't be used, or stopped being usable.

use cudarc::driver::DriverError;
use ringfence_engine::model::ModelError;

/// An error of the device, its driver or its compiler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library is not on this machine.
    #[error("no {what} found: looked for {looked_for}")]
    Library {
        /// Driver or compiler.
        what: &'static str,
        /// Names and folders tried.
        looked_for: String,
    },
    /// The ordinal names no device.
    #[error("no device cuda:{ordinal}: the driver knows {found} device(s)")]
    Ordinal {
        /// What was asked for.
        ordinal: usize,
        /// How many there are.
        found: usize,
    },
    /// The device is too old.
    #[error("cuda:{ordinal} ({name}) has compute capability {major}.{minor}, expected 8.9 or newer")]
    Capability {
        /// The device.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
    /// The driver refused a call.
    #[error("{doing}: {why}")]
    Driver {
        /// What was tried.
        doing: String,
        /// The driver's words.
        why: String,
    },
    /// A kernel file was not compiled.
    #[error("kernels {file} do not compile: {log}")]
    Compile {
        /// The file.
        file: String,
        /// The compiler's words.
        log: String,
    },
    /// Device memory does not suffice.
    #[error("{what} needs {needed} bytes of device memory, {free} are free")]
    Memory {
        /// What needs it.
        what: String,
        /// Bytes asked for.
        needed: u64,
        /// Bytes left.
        free: u64,
    },
    /// A shape that the kernels don't take.
    #[error("{what} is {got}, expected {expected}")]
    Shape {
        /// Which size.
        what: String,
        /// The size.
        got: usize,
        /// What is possible.
        expected: String,
    },
    /// A file of the kernel cache.
    #[error("kernel cache {path}: {why}")]
    Cache {
        /// The file.
        path: String,
        /// The system's words.
        why: String,
    },
    /// The device computes other bits than the CPU.
    #[error("self-test: {what}: output {index} has the bits {got:#010x}, the CPU computes {expected:#010x}")]
    SelfTest {
        /// Which product.
        what: String,
        /// Where in its output.
        index: usize,
        /// The device's bits.
        got: u32,
        /// The CPU's bits.
        expected: u32,
    },
    /// The checkpoint does not fit.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// Words for the driver's errors.
pub(crate) trait Doing<T> {
    /// Says what was tried.
    fn doing(self, what: impl Into<String>) -> Result<T, CudaError>;
}

impl<T> Doing<T> for Result<T, DriverError> {
    fn doing(self, what: impl Into<String>) -> Result<T, CudaError> {
        self.map_err(|error| CudaError::Driver { doing: what.into(), why: error.to_string() })
    }
}
