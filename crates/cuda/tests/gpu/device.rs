//! What a device is refused for, what loading takes of it, and two engines on it at once.

use std::collections::BTreeSet;
use std::path::Path;

use ringfence_cuda::nvrtc::{Compiler, Source};
use ringfence_cuda::{BuildError, CudaEngine, CudaError, CudaSettings, kernels, linear, load};
use ringfence_engine::engine::Engine;
use ringfence_engine::engine::cpu::{CpuEngine, CpuSettings};
use ringfence_engine::ids::WireEncoding;
use ringfence_engine::model::Checkpoint;
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};

use crate::engine::{MODEL, Step, both, checkpoint, cuda, run, settings, shape};
use crate::support::{Gpu, Outcome, Test, folders, kernel_cache, words};

/// All of them.
pub(crate) const TESTS: &[Test] = &[
    ("device_two_engines", |_| two_engines()),
    ("device_refused_for_its_bits", refused_for_its_bits),
    ("device_damaged_cache", damaged_cache),
    ("device_damaged_weights", |_| damaged_weights()),
    ("device_peak", |_| peak()),
    ("device_steps_take_nothing", |_| steps_take_nothing()),
    ("device_inventory", |_| inventory()),
];

/// Device memory that loading may take beside what stays.
const PEAK: u64 = 256 << 20;

/// Two engines in two threads share nothing: each has the processor's bits.
fn two_engines() -> Outcome {
    std::thread::scope(|scope| {
        let threads = ["0:3", "3:7"].map(|range| scope.spawn(move || both(&[range], true)));
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread ended".to_owned())?)
    })
}

/// Copies the machine code of every kernel into a cache of its own.
fn copy_cache(gpu: &Gpu, to: &Compiler) -> Outcome {
    let facts = gpu.device.facts();
    let from = words(Compiler::find(&folders(), Some(kernel_cache())))?;
    for source in kernels::sources() {
        let kept = |compiler: &Compiler| compiler.kept(&source, facts.capability, facts.driver).ok_or("no cache");
        std::fs::copy(kept(&from)?, kept(to)?).map_err(|e| e.to_string())?;
    }
    Ok(())
}

fn with_cache(folder: &Path) -> Result<CudaEngine, BuildError> {
    let checkpoint = checkpoint().map_err(|why| CudaError::Driver { doing: "open".to_owned(), why })?;
    let range = ringfence_engine::ids::LayerRange::new(0, 1).unwrap_or_else(|_| checkpoint.all_layers());
    CudaEngine::new(&checkpoint, range, &CudaSettings { kernel_cache: Some(folder.to_owned()), ..settings(false) })
}

/// A compiler that adds a little wrongly gives kernels that run, and the device is refused: by the
/// product, the output and both its values.
fn refused_for_its_bits(gpu: &Gpu) -> Outcome {
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let compiler = words(Compiler::find(&folders(), Some(folder.path().to_owned())))?;
    copy_cache(gpu, &compiler)?;
    with_cache(folder.path()).map_err(|error| format!("a sound cache: {error}"))?;
    let facts = gpu.device.facts();
    let wrong = format!("#define fmaf(a, b, c) ((a) * (b) + (c) * 1.0000001f)\n{}", linear::SOURCE.assembled());
    let wrong = Source { text: Box::leak(wrong.into_boxed_str()), ..linear::SOURCE };
    words(compiler.cubin(&wrong, facts.capability, facts.driver))?;
    let kept = |source| compiler.kept(source, facts.capability, facts.driver).ok_or("no cache");
    std::fs::copy(kept(&wrong)?, kept(&linear::SOURCE)?).map_err(|e| e.to_string())?;
    match with_cache(folder.path()) {
        Err(BuildError::Cuda(error @ CudaError::SelfTest { .. })) => {
            println!("     {error}");
            Ok(())
        }
        Err(error) => Err(format!("refused for another reason: {error}")),
        Ok(_) => Err("wrong sums were taken".to_owned()),
    }
}

/// Machine code that is damaged on disk is compiled again.
fn damaged_cache(gpu: &Gpu) -> Outcome {
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let compiler = words(Compiler::find(&folders(), Some(folder.path().to_owned())))?;
    copy_cache(gpu, &compiler)?;
    let facts = gpu.device.facts();
    let source = ringfence_cuda::repack::SOURCE;
    let file = compiler.kept(&source, facts.capability, facts.driver).ok_or("no cache")?;
    let mut bytes = std::fs::read(&file).map_err(|e| e.to_string())?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, &bytes).map_err(|e| e.to_string())?;
    with_cache(folder.path()).map_err(|error| error.to_string())?;
    let again = std::fs::read(&file).map_err(|e| e.to_string())?;
    if again == bytes { Err("the damaged file is still there".to_owned()) } else { Ok(()) }
}

/// Codes and scales that are no numbers are refused, by tensor and place, as the processor refuses them.
fn damaged_weights() -> Outcome {
    let shard = "model-00001-of-00005.safetensors";
    for (tensor, bad, words) in [
        ("layers.0.attn.wq_a.scale", 255, "wq_a"),
        ("layers.0.attn.wo_a.scale", 255, "wo_a"),
        ("layers.0.ffn.experts.0.w1.scale", 255, "experts.0.w1"),
        ("layers.0.attn.wq_a.weight", 0x7f, "wq_a"),
        ("layers.0.attn.wo_a.weight", 0xff, "wo_a"),
    ] {
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        for entry in std::fs::read_dir(MODEL).map_err(|e| e.to_string())?.flatten() {
            if entry.path().is_file() {
                std::fs::copy(entry.path(), folder.path().join(entry.file_name())).map_err(|e| e.to_string())?;
            }
        }
        let path = folder.path().join(shard);
        let mut bytes = std::fs::read(&path).map_err(|e| e.to_string())?;
        let (size, header) = SafeTensors::read_metadata(&bytes).map_err(|e| e.to_string())?;
        let info = header.info(tensor).ok_or_else(|| format!("no {tensor}"))?;
        // The smallest of these tensors has two bytes.
        bytes[8 + size + info.data_offsets.0 + 1] = bad;
        std::fs::write(&path, bytes).map_err(|e| e.to_string())?;
        let checkpoint = Checkpoint::open_dir(folder.path()).map_err(|e| e.to_string())?;
        let range = "0:1".parse().map_err(|_| "range")?;
        let on_cpu = CpuEngine::new(&checkpoint, range, &CpuSettings::default()).err().map(|e| e.to_string());
        match (CudaEngine::new(&checkpoint, range, &settings(false)), on_cpu) {
            (Err(error @ (BuildError::Model(_) | BuildError::Cuda(CudaError::Model(_)))), Some(on_cpu)) => {
                let error = error.to_string();
                println!("     {error}");
                let bare = |words: &str| words.replace(".weight", "");
                if !error.contains(words) || !error.contains("NaN") || bare(&error) != bare(&on_cpu) {
                    return Err(format!("{tensor}: {error:?} for the processor's {on_cpu:?}"));
                }
            }
            (got, on_cpu) => return Err(format!("{tensor}: {:?}, the processor: {on_cpu:?}", got.err())),
        }
    }
    Ok(())
}

/// Loading takes little beside what stays.
fn peak() -> Outcome {
    let engine = cuda("0:7", true)?;
    let (now, most) = engine.device().taken();
    println!("     {now} bytes in arenas, {most} at most");
    if now < engine.facts().weight_bytes || most <= now || most - now > PEAK {
        return Err(format!("{most} bytes at most, {now} stay, {} of weights", engine.facts().weight_bytes));
    }
    Ok(())
}

/// Passes and drafts, captured and eager, take no device memory and give none back.
fn steps_take_nothing() -> Outcome {
    for graphs in [true, false] {
        let mut engine = cuda("0:7", graphs)?;
        let session = Step::Open(1, shape(64, &[], WireEncoding::Fp8, true));
        let steps = |from: usize| {
            let pass = move |(at, len)| Step::Forward(vec![(1, from + at, len, 0)], 0);
            [(0, 1), (1, 1), (2, 6), (4, 3), (7, 40)].map(pass).into_iter().chain([Step::Draft(1, from + 46, 9)])
        };
        let went = |engine: &mut CudaEngine, step: &Step| match run(engine, step) {
            None | Some(Ok(_)) => Ok(()),
            Some(Err(why)) => Err(why),
        };
        went(&mut engine, &session)?;
        // The driver loads kernels when they are first launched.
        steps(0).try_for_each(|step| went(&mut engine, &step))?;
        let held = |engine: &CudaEngine| Ok::<_, String>((engine.device().taken(), words(engine.free_bytes())?));
        let before = held(&engine)?;
        for round in 1..4 {
            steps(47 * round).try_for_each(|step| went(&mut engine, &step))?;
            if held(&engine)? != before {
                return Err(format!("round {round}, graphs {graphs}: {:?}, before {before:?}", held(&engine)?));
            }
        }
    }
    Ok(())
}

/// The inventory has every byte of the range's tensors, with the digests of what is stored.
fn inventory() -> Outcome {
    let (checkpoint, engine) = (checkpoint()?, cuda("2:7", false)?);
    let weights = checkpoint.weights(engine.facts().range).map_err(|e| e.to_string())?;
    let lines = words(load::inventory(&weights, engine.weights().held()))?;
    let names: BTreeSet<&str> = lines.iter().map(|line| line.held.name.as_str()).collect();
    let (stored, held) =
        lines.iter().fold((0, 0), |(stored, held), line| (stored + line.stored, held + line.held.bytes));
    if names.len() != lines.len() || stored != weights.stored_bytes() || held > engine.facts().weight_bytes {
        return Err(format!("{} lines of {} names, {stored} bytes, {held} held", lines.len(), names.len()));
    }
    for line in &lines {
        let bytes = weights.stored(&line.held.name).map_err(|e| e.to_string())?;
        let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        if line.sha256 != digest || line.stored != bytes.len() as u64 {
            return Err(format!("{}: {} for {digest}", line.held.name, line.sha256));
        }
    }
    Ok(())
}
