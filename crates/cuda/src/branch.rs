//! A second stream beside the one that orders an engine's work.
//!
//! Owns where it leaves and meets the first. What runs on it is part of a pass: it begins behind
//! something of the first stream and is waited for there, so a captured pass has it too.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

use crate::driver::Device;
use crate::error::{CudaError, Doing};

/// A stream for launches that may run beside those of the device's own.
#[derive(Debug)]
pub struct Branch {
    stream: Arc<CudaStream>,
    begin: CudaEvent,
    end: CudaEvent,
}

impl Branch {
    /// A branch of `device`'s stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let event = || device.context().new_event(None).doing("make an event");
        let stream = device.context().new_stream().doing("make a stream")?;
        Ok(Self { stream, begin: event()?, end: event()? })
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Lets what follows on the branch wait for all that is on `main`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn fork(&self, main: &CudaStream) -> Result<(), CudaError> {
        self.begin.record(main).doing("record an event")?;
        self.stream.wait(&self.begin).doing("wait for an event")
    }

    /// Lets what follows on `main` wait for all that is on the branch.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn join(&self, main: &CudaStream) -> Result<(), CudaError> {
        self.end.record(&self.stream).doing("record an event")?;
        main.wait(&self.end).doing("wait for an event")
    }
}
