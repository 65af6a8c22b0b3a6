//! All kernels of the engine, compiled and loaded.

use std::collections::BTreeMap;

use cudarc::driver::{CudaFunction, sys};

use crate::driver::Device;
use crate::error::{CudaError, Doing};
use crate::nvrtc::{Compiler, Source};

/// Every kernel file.
pub fn sources() -> impl Iterator<Item = Source> {
    [crate::linear::SOURCE, crate::experts::SOURCE, crate::repack::SOURCE, crate::experts_tile::SOURCE]
        .into_iter()
        .chain(crate::tile::SOURCES)
        .chain(crate::ops::SOURCES)
}

/// All kernels, by name.
#[derive(Debug)]
pub struct Kernels {
    functions: BTreeMap<&'static str, CudaFunction>,
}

impl Kernels {
    /// Compiles (or finds in the cache) and loads every kernel.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn load(device: &Device, compiler: &Compiler) -> Result<Self, CudaError> {
        let facts = device.facts();
        // The compiler takes seconds for some files and may be asked by several threads.
        let sources: Vec<Source> = sources().collect();
        let compiled: Vec<_> = std::thread::scope(|scope| {
            let compile = |source| move || compiler.cubin(source, facts.capability, facts.driver);
            let threads: Vec<_> = sources.iter().map(|source| scope.spawn(compile(source))).collect();
            threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        let mut functions = BTreeMap::new();
        for (source, cubin) in sources.iter().zip(compiled) {
            let lost = |_| CudaError::Compile { file: source.file.to_owned(), log: "the compiler ended".to_owned() };
            let module = device.module(source.file, cubin.map_err(lost)??)?;
            for &name in source.kernels {
                let function = module.load_function(name).doing(format!("find kernel {name}"))?;
                // One division of shared memory and cache for all: a multiprocessor that changes it
                // must first run empty.
                let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
                function.set_attribute(attribute, 100).doing(format!("prepare kernel {name}"))?;
                functions.insert(name, function);
            }
        }
        Ok(Self { functions })
    }

    /// One kernel.
    ///
    /// # Errors
    /// [`CudaError::Compile`] if no file lists it.
    pub fn get(&self, name: &'static str) -> Result<&CudaFunction, CudaError> {
        self.functions
            .get(name)
            .ok_or_else(|| CudaError::Compile { file: name.to_owned(), log: "no such kernel".to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compiles every kernel for the H200 where the compiler is found, and says where not.
    #[test]
    #[allow(clippy::print_stderr, reason = "says why nothing was compiled")]
    #[allow(clippy::disallowed_methods, reason = "a test reads where the compiler is")]
    fn kernels_compile() {
        let folders: Vec<_> =
            ["NVRTC_HOME", "CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os).map(Into::into).collect();
        let compiler = match Compiler::find(&folders, None) {
            Ok(compiler) => compiler,
            Err(why) => {
                eprintln!("no kernel was compiled: {why}; NVRTC_HOME may name its folder");
                return;
            }
        };
        for source in sources() {
            let code = compiler.cubin(&source, (9, 0), 13_000).unwrap();
            for kernel in source.kernels {
                let named = code.windows(kernel.len()).any(|window| window == kernel.as_bytes());
                assert!(named, "{} has no kernel {kernel}", source.file);
            }
        }
    }
}
