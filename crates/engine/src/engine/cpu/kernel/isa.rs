//! Which vector instructions an engine computes with: chosen once, carried as a value.

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::lanes::Lanes;
use super::simd::Simd;

/// The vector instructions to compute with; the bits of every result are the same with all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Kind);

/// Private, so that only [`Isa::detect`] makes a value that promises instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

/// One operation, written over any lanes.
///
/// `run` is `#[inline(always)]` in every implementation and uses no closure in its loops, so the
/// whole body is compiled with the instructions of the lanes it is instantiated with.
pub(crate) trait Job {
    /// What the operation returns.
    type Out;

    /// Runs the operation.
    fn run<V: Simd>(self) -> Self::Out;
}

impl Isa {
    /// The fallback that runs everywhere.
    pub const PORTABLE: Self = Self(Kind::Portable);

    /// Asks the processor what it can do and takes the best.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            return Self(Kind::Avx2);
        }
        Self::PORTABLE
    }

    /// The name in reports: `avx2` or `portable`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
        }
    }

    /// Runs `job` with these instructions.
    #[inline]
    pub(crate) fn dispatch<J: Job>(self, job: J) -> J::Out {
        match self.0 {
            Kind::Portable => job.run::<Lanes<8>>(),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => avx2::run(self, job),
        }
    }

    /// Whether the value was made on a processor that was asked and has AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn has_avx2(self) -> bool {
        self.0 == Kind::Avx2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portable_can_be_forced() {
        assert_eq!(Isa::PORTABLE.name(), "portable");
        assert!(["portable", "avx2"].contains(&Isa::detect().name()));
    }
}
