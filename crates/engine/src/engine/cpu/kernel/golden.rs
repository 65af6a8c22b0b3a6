//! Reads the golden vectors of single operations, for the tests of this folder.

use half::bf16;
use safetensors::{SafeTensors, tensor::TensorView};

/// The bytes of one file of golden vectors.
pub(crate) struct Golden(Vec<u8>);

impl Golden {
    /// The operations' vectors.
    pub(crate) fn ops() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/ops.safetensors");
        Self(std::fs::read(path).unwrap())
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view: TensorView<'_> = file.tensor(name).unwrap();
        view.data().to_vec()
    }

    /// A tensor of bytes.
    pub(crate) fn u8(&self, name: &str) -> Vec<u8> {
        self.bytes(name)
    }

    /// A bf16 tensor.
    pub(crate) fn bf16(&self, name: &str) -> Vec<bf16> {
        self.bytes(name).as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b)).collect()
    }

    /// An fp32 tensor.
    pub(crate) fn f32(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    /// An int32 tensor.
    pub(crate) fn i32(&self, name: &str) -> Vec<i32> {
        self.bytes(name).as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
    }
}
