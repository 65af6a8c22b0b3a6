//! Kernels from source to machine code: compiled at start, kept on disk.
//!
//! Owns the options that make the arithmetic canonical, and the name of a cached kernel: the digest
//! of all that decides its code. A cached file that is damaged or unwritable costs time only.

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{result, sys};
use libloading::Library;
use sha2::{Digest, Sha256};

use crate::error::CudaError;

/// The headers that a kernel file may include by name.
const HEADERS: [(&str, &str); 7] = [
    ("common.cuh", include_str!("kernels/common.cuh")),
    ("quant.cuh", include_str!("kernels/quant.cuh")),
    ("math.cuh", include_str!("kernels/math.cuh")),
    ("product.cuh", include_str!("kernels/product.cuh")),
    ("state.cuh", include_str!("kernels/state.cuh")),
    ("keys.cuh", include_str!("kernels/keys.cuh")),
    ("tile.cuh", include_str!("kernels/tile.cuh")),
];

/// Options of every kernel: nothing is contracted, flushed or approximated.
const OPTIONS: [&str; 6] =
    ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17", "--restrict"];

/// One kernel file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Its name, for messages.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The kernels in it, by their C names.
    pub kernels: &'static [&'static str],
}

impl Source {
    /// The text with its headers in place.
    #[must_use]
    pub fn assembled(&self) -> String {
        let mut out = String::new();
        for line in self.text.lines() {
            let name = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
            match name.and_then(|name| HEADERS.iter().find(|(header, _)| *header == name)) {
                Some((_, text)) => out.push_str(text),
                None => out.push_str(line),
            }
            out.push('\n');
        }
        out
    }
}

/// The compiler.
#[derive(Debug)]
pub struct Compiler {
    cache: Option<PathBuf>,
    version: (i32, i32),
    // Opened by path, so that the compiler's names find them; closed with the value.
    _libraries: Vec<Library>,
}

impl Compiler {
    /// Finds the compiler: by its names on the loader's path, then in `folders` and their `lib64`
    /// and `lib`. Machine code is kept in `cache`, if given.
    ///
    /// # Errors
    /// [`CudaError::Library`] with what was looked for.
    pub fn find(folders: &[PathBuf], cache: Option<PathBuf>) -> Result<Self, CudaError> {
        let mut libraries = Vec::new();
        let places = folders.iter().flat_map(|folder| [folder.join("lib64"), folder.join("lib"), folder.clone()]);
        for place in places {
            if present() {
                break;
            }
            // SAFETY: NVRTC runs no code of ours when it is loaded.
            libraries = files(&place).iter().filter_map(|file| unsafe { Library::new(file) }.ok()).collect();
        }
        if !present() {
            let places: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
            let looked_for = format!("libnvrtc.so, libnvrtc.so.13 on the loader's path and in [{}]", places.join(", "));
            return Err(CudaError::Library { what: "CUDA compiler (NVRTC)", looked_for });
        }
        let mut version = (0, 0);
        // SAFETY: writes two integers.
        let _ = unsafe { sys::nvrtcVersion(&raw mut version.0, &raw mut version.1) };
        Ok(Self { cache, version, _libraries: libraries })
    }

    /// The compiler's version.
    #[must_use]
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The machine code of `source` for a device of this compute capability and driver version.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's words.
    pub fn cubin(&self, source: &Source, capability: (i32, i32), driver: i32) -> Result<Vec<u8>, CudaError> {
        let (text, options) = (source.assembled(), options(capability));
        let Some(file) = self.kept(source, capability, driver) else { return compile(source.file, &text, &options) };
        if let Some(code) = read_cached(&file) {
            return Ok(code);
        }
        let code = compile(source.file, &text, &options)?;
        // The next start compiles again where this fails.
        let _ = write_cached(&file, &code);
        Ok(code)
    }

    /// The file in which that machine code is kept, whether it is there or not; none without a cache.
    #[must_use]
    pub fn kept(&self, source: &Source, capability: (i32, i32), driver: i32) -> Option<PathBuf> {
        let name = self.digest(&source.assembled(), &options(capability), driver);
        Some(self.cache.as_ref()?.join(format!("{name}.cubin")))
    }

    /// Names what decides the machine code.
    fn digest(&self, text: &str, options: &[String], driver: i32) -> String {
        let mut hash = Sha256::new();
        let (major, minor) = self.version;
        hash.update(format!("{major}.{minor} {driver} {}\n", options.join(" ")));
        hash.update(text);
        hex(&hash.finalize())
    }
}

fn options(capability: (i32, i32)) -> Vec<String> {
    let own = format!("--gpu-architecture=sm_{}{}", capability.0, capability.1);
    OPTIONS.iter().map(|&option| option.to_owned()).chain([own]).collect()
}

fn present() -> bool {
    // SAFETY: opens libraries by the compiler's own names and calls nothing in them.
    unsafe { sys::is_culib_present() }
}

/// The compiler's files in `folder`, the one that the other opens first.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut files: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| name(path).starts_with("libnvrtc") && !name(path).contains(".alt."))
        .collect();
    files.sort_unstable_by_key(|path| (!name(path).contains("builtins"), path.clone()));
    files
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A cached file is a digest of the code, then the code.
fn read_cached(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (digest, code) = bytes.split_at_checked(32)?;
    (Sha256::digest(code).as_slice() == digest).then(|| code.to_vec())
}

fn write_cached(file: &Path, code: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut bytes = Sha256::digest(code).to_vec();
    bytes.extend_from_slice(code);
    let part = file.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&part, bytes)?;
    std::fs::rename(part, file)
}

/// A program that is destroyed when it goes out of scope.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `create_program` and destroyed here only.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn compile(file: &str, text: &str, options: &[String]) -> Result<Vec<u8>, CudaError> {
    let failed = |log: String| CudaError::Compile { file: file.to_owned(), log };
    let source = CString::new(text).map_err(|error| failed(error.to_string()))?;
    let name = CString::new(file).map_err(|error| failed(error.to_string()))?;
    let program = Program(result::create_program(&source, Some(&name)).map_err(|error| failed(format!("{error:?}")))?);
    // SAFETY: the program lives.
    if unsafe { result::compile_program(program.0, options) }.is_err() {
        // SAFETY: the program lives.
        let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
        return Err(failed(words(&log)));
    }
    let mut size = 0;
    // SAFETY: the program was compiled; writes one size.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut size) }.result().map_err(|e| failed(format!("{e:?}")))?;
    let mut code = vec![0u8; size];
    // SAFETY: the program was compiled; writes `size` bytes.
    unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) }
        .result()
        .map_err(|e| failed(format!("{e:?}")))?;
    Ok(code)
}

/// The compiler's log as text.
fn words(log: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = log.iter().map(|&c| c.cast_unsigned()).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}
