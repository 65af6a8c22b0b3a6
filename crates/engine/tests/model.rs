//! A checkpoint is refused by arithmetic, before anything is allocated by what it claims, with
//! messages that name the file or tensor, both values and what to do.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use ringfence_engine::ids::LayerRange;
use ringfence_engine::model::checkpoint::parse_index;
use ringfence_engine::model::layout::Kind;
use ringfence_engine::model::shard::ShardHeader;
use ringfence_engine::model::{Checkpoint, ModelConfig, ModelError};
use serde_json::{Value, json};
use tempfile::TempDir;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-v4-flash");

fn range(text: &str) -> LayerRange {
    text.parse().unwrap()
}

/// A copy of the tiny model whose files are links until they are changed.
struct Copy {
    dir: TempDir,
}

impl Copy {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(MODEL).unwrap() {
            let entry = entry.unwrap();
            std::os::unix::fs::symlink(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        Self { dir }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    fn write(&self, file: &str, bytes: &[u8]) {
        let _ = fs::remove_file(self.path(file));
        fs::write(self.path(file), bytes).unwrap();
    }

    fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Value)) {
        let mut value: Value = serde_json::from_slice(&fs::read(self.path(file)).unwrap()).unwrap();
        edit(&mut value);
        self.write(file, &serde_json::to_vec(&value).unwrap());
    }

    /// Rewrites one shard's header; data stays.
    fn edit_header(&self, shard: u32, edit: impl FnOnce(&mut Value)) {
        let file = shard_name(shard);
        let bytes = fs::read(self.path(&file)).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).unwrap());
        let mut header: Value = serde_json::from_slice(header).unwrap();
        edit(&mut header);
        let header = serde_json::to_vec(&header).unwrap();
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header);
        out.extend(data);
        self.write(&file, &out);
    }

    /// Overwrites bytes of one tensor.
    fn poke(&self, shard: u32, tensor: &str, at: usize, with: &[u8]) {
        let file = shard_name(shard);
        let mut bytes = fs::read(self.path(&file)).unwrap();
        let begin = ShardHeader::parse(&file, &bytes).unwrap().tensors[tensor].bytes.start + at;
        bytes[begin..begin + with.len()].copy_from_slice(with);
        self.write(&file, &bytes);
    }

    fn open(&self) -> Result<Checkpoint, ModelError> {
        Checkpoint::open_dir(self.dir.path())
    }

    fn refusal(&self, layers: &str) -> String {
        let checkpoint = match self.open() {
            Ok(checkpoint) => checkpoint,
            Err(error) => return error.to_string(),
        };
        let weights = match checkpoint.weights(range(layers)) {
            Ok(weights) => weights,
            Err(error) => return error.to_string(),
        };
        weights.check_values().expect_err("a spoiled checkpoint is refused").to_string()
    }
}

fn shard_name(shard: u32) -> String {
    format!("model-{shard:05}-of-00005.safetensors")
}

#[track_caller]
fn assert_names(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

#[test]
fn every_range_reads_no_more_than_its_own_tensors() {
    let checkpoint = Checkpoint::tiny().unwrap();
    for lo in 0..7 {
        for hi in lo + 1..=7 {
            let range = LayerRange::new(lo, hi).unwrap();
            let weights = checkpoint.weights(range).unwrap();
            for spec in checkpoint.tensors(range) {
                let short = spec.name.strip_suffix(".weight").unwrap_or(&spec.name);
                match spec.kind {
                    Kind::Fp8 => drop(weights.fp8(short).unwrap()),
                    Kind::Fp4 => drop(weights.fp4(short).unwrap()),
                    Kind::Bf16 => drop(weights.bf16(short).unwrap()),
                    Kind::F32 => drop(weights.f32(&spec.name).unwrap()),
                    Kind::Ids => drop(weights.expert_ids(&spec.name).unwrap()),
                    Kind::Fp8Scale | Kind::Fp4Scale => {}
                }
            }
            let stored = checkpoint.stored_bytes(range).unwrap();
            assert_eq!(stored, weights.stored_bytes());
            let read = weights.bytes_read();
            assert!(read >= stored, "{range}: every tensor was asked for");
            assert!(read as f64 <= 1.02 * stored as f64, "{range}: {read} bytes read for {stored} of tensors");
            let opened: Vec<_> = weights.opened().map(str::to_owned).collect();
            let needed: Vec<_> = checkpoint.shards(range).unwrap().into_iter().map(|need| need.file).collect();
            assert_eq!(opened, needed);
        }
    }
}

#[test]
fn a_range_opens_only_its_shards() {
    let copy = Copy::new();
    for shard in [1, 3, 4, 5] {
        fs::remove_file(copy.path(&shard_name(shard))).unwrap();
    }
    let checkpoint = copy.open().unwrap();
    assert_eq!(checkpoint.weights(range("2:4")).unwrap().opened().collect::<Vec<_>>(), [shard_name(2)]);
    assert_names(&checkpoint.weights(range("2:5")).unwrap_err().to_string(), &[&shard_name(3), "2:5", "--shards"]);
    let needs = checkpoint.shards(range("6:7")).unwrap();
    assert_eq!(needs.iter().map(|need| need.file.clone()).collect::<Vec<_>>(), [shard_name(4)]);
    assert_eq!(needs[0].file_bytes, None, "a shard that is not there has no size");
}

#[test]
fn the_tail_drafts_only_with_every_tapped_layer() {
    let checkpoint = Checkpoint::tiny().unwrap();
    for (text, drafts) in [("4:7", true), ("0:7", true), ("5:7", false), ("4:6", false), ("6:7", false)] {
        assert_eq!(checkpoint.drafts(range(text)), drafts, "{text}");
    }
}

#[test]
fn digest_is_that_of_config_then_index_and_equal_for_directory_and_embedded() {
    use sha2::Digest;
    let mut bytes = fs::read(Path::new(MODEL).join("config.json")).unwrap();
    bytes.extend(fs::read(Path::new(MODEL).join("model.safetensors.index.json")).unwrap());
    let expected: [u8; 32] = sha2::Sha256::digest(&bytes).into();
    assert_eq!(Checkpoint::tiny().unwrap().digest(), expected);
    assert_eq!(Checkpoint::open(MODEL).unwrap().digest(), expected);
}

#[test]
fn the_inference_spelling_says_the_same() {
    let copy = Copy::new();
    let whole = copy.open().unwrap().config().clone();
    fs::remove_file(copy.path("config.json")).unwrap();
    assert_eq!(copy.open().unwrap().config(), &whole);
}

#[test]
fn long_names_are_read_as_short_ones() {
    let copy = Copy::new();
    let long = |name: &str| {
        let name = name
            .replace(".attn.", ".self_attn.")
            .replace(".ffn.", ".mlp.")
            .replace("gate.bias", "gate.e_score_correction_bias");
        let name = name.strip_suffix(".scale").map_or(name.clone(), |stem| format!("{stem}.weight_scale_inv"));
        format!("model.{name}")
    };
    copy.edit_json("model.safetensors.index.json", |index| {
        let map = index["weight_map"].as_object_mut().unwrap();
        *map = std::mem::take(map).into_iter().map(|(name, file)| (long(&name), file)).collect();
    });
    for shard in 1..=5 {
        copy.edit_header(shard, |header| {
            let map = header.as_object_mut().unwrap();
            *map = std::mem::take(map)
                .into_iter()
                .map(|(name, entry)| if name == "__metadata__" { (name, entry) } else { (long(&name), entry) })
                .collect();
        });
    }
    let checkpoint = copy.open().unwrap();
    let tiny = Checkpoint::tiny().unwrap();
    let (ours, theirs) = (checkpoint.weights(range("0:7")).unwrap(), tiny.weights(range("0:7")).unwrap());
    ours.check_values().unwrap();
    assert_eq!(ours.fp8("layers.3.attn.wq_a").unwrap().codes, theirs.fp8("layers.3.attn.wq_a").unwrap().codes);
    assert_eq!(ours.f32("layers.3.ffn.gate.bias").unwrap(), theirs.f32("layers.3.ffn.gate.bias").unwrap());
}

#[test]
fn other_models_are_refused_by_field_name() {
    let cases: &[(&str, Value, &str)] = &[
        ("/model_type", json!("llama"), "deepseek_v4"),
        ("/expert_dtype", json!("fp8"), "fp4"),
        ("/scoring_func", json!("softmax"), "sqrtsoftplus"),
        ("/norm_topk_prob", json!(false), "true"),
        ("/quantization_config/quant_method", json!("awq"), "fp8"),
        ("/quantization_config/fmt", json!("e5m2"), "e4m3"),
        ("/quantization_config/scale_fmt", json!("float"), "ue8m0"),
        ("/quantization_config/weight_block_size", json!([64, 64]), "[128, 128]"),
        ("/hidden_size", json!(200), "multiple of 128"),
        ("/q_lora_rank", json!(64), "multiple of 128"),
        ("/moe_intermediate_size", json!(96), "multiple of 128"),
        ("/num_hidden_layers", json!(0), "1 to"),
        ("/num_hidden_layers", json!(8_000_000_000u64), "1 to"),
        ("/vocab_size", json!(1u64 << 60), "2 to"),
        ("/compress_ratios", json!([0, 0]), "one per layer"),
        ("/compress_ratios/9", json!(4), "draft stage"),
        ("/dspark_target_layer_ids", json!([4, 5, 9]), "below 7"),
        ("/dspark_noise_token_id", json!(2048), "below vocab_size 2048"),
        ("/eos_token_id", json!("x"), "token id"),
        ("/num_experts_per_tok", json!(9), "1 to 8"),
        ("/n_shared_experts", json!(2), "1"),
        ("/rope_scaling/type", json!("linear"), "yarn"),
        ("/index_head_dim", json!(96), "power of two"),
    ];
    for (pointer, value, expected) in cases {
        let copy = Copy::new();
        copy.edit_json("config.json", |config| *config.pointer_mut(pointer).unwrap() = value.clone());
        let field = pointer[1..].split('/').find(|part| part.parse::<usize>().is_err()).unwrap();
        assert_names(&copy.refusal("0:7"), &["config.json", field, expected]);
    }
    let copy = Copy::new();
    copy.edit_json("config.json", |config| drop(config.as_object_mut().unwrap().remove("q_lora_rank")));
    assert_names(&copy.refusal("0:7"), &["q_lora_rank is missing"]);
}

#[test]
fn missing_files_are_named() {
    let empty = tempfile::tempdir().unwrap();
    assert_names(&Checkpoint::open_dir(empty.path()).unwrap_err().to_string(), &["config.json is missing", "tiny"]);
    let copy = Copy::new();
    fs::remove_file(copy.path("model.safetensors.index.json")).unwrap();
    assert_names(&copy.refusal("0:7"), &["index.json is missing"]);
    assert_names(&Checkpoint::tiny().unwrap().check_range(range("5:9")).unwrap_err().to_string(), &["5:9", "0:7"]);
}

#[test]
fn a_spoiled_index_is_refused() {
    let copy = Copy::new();
    copy.edit_json("model.safetensors.index.json", |index| {
        index["weight_map"]["embed.weight"] = json!("../secret");
    });
    assert_names(&copy.refusal("0:7"), &["embed.weight", "../secret", "plain file name"]);

    let copy = Copy::new();
    copy.edit_json("model.safetensors.index.json", |index| {
        index["weight_map"]["model.embed_tokens.weight"] = json!(shard_name(1));
    });
    assert_names(&copy.refusal("0:7"), &["embed.weight", "model.embed_tokens.weight", "both name"]);

    let copy = Copy::new();
    copy.edit_json("model.safetensors.index.json", |index| {
        index["weight_map"].as_object_mut().unwrap().remove("layers.2.attn.wkv.scale");
    });
    assert_names(&copy.refusal("0:7"), &["layers.2.attn.wkv.scale", "not in the index"]);

    let copy = Copy::new();
    copy.edit_json("model.safetensors.index.json", |index| {
        let map = index["weight_map"].as_object_mut().unwrap();
        map.retain(|name, _| !name.starts_with("mtp.2."));
    });
    assert_names(&copy.refusal("0:7"), &["2 draft stages", "3"]);

    let copy = Copy::new();
    copy.edit_json("model.safetensors.index.json", |index| {
        index["weight_map"].as_object_mut().unwrap().retain(|name, _| !name.starts_with("mtp."));
    });
    let plain = copy.open().unwrap();
    assert!(!plain.drafts(range("0:7")), "a checkpoint without draft stages serves undrafted");
    plain.weights(range("0:7")).unwrap();
}

#[test]
fn spoiled_shards_are_refused() {
    let name = shard_name(2);
    let whole = fs::read(Path::new(MODEL).join(&name)).unwrap();

    for cut in [0, 5, 8, 100, 16_000, whole.len() / 2, whole.len() - 1] {
        let copy = Copy::new();
        copy.write(&name, &whole[..cut]);
        assert_names(&copy.refusal("2:4"), &[&name, "truncated", &cut.to_string(), "download"]);
    }
    for claim in [u64::MAX, 1 << 40, (64 << 20) + 1] {
        let copy = Copy::new();
        let mut huge = whole.clone();
        huge[..8].copy_from_slice(&claim.to_le_bytes());
        copy.write(&name, &huge);
        assert_names(&copy.refusal("2:4"), &[&name, "header", &claim.to_string(), &(64u64 << 20).to_string()]);
    }
    let tensor = "layers.2.attn.wkv.weight";
    type Case<'a> = (&'a dyn Fn(&mut Value), &'a [&'a str]);
    let cases: &[Case<'_>] = &[
        (&|h| h[tensor]["dtype"] = json!("F8_E5M2"), &["another type", "F8_E4M3"]),
        (&|h| h[tensor]["dtype"] = json!("FP3"), &["unknown type", "FP3"]),
        (&|h| h[tensor]["shape"] = json!([256, 128]), &["[256, 128]", "[128, 256]"]),
        (&|h| h[tensor]["shape"] = json!([u64::MAX, u64::MAX]), &["larger than any memory"]),
        (&|h| h[tensor]["data_offsets"] = json!([10, 5]), &["10..5"]),
        (&|h| h[tensor]["data_offsets"] = json!([0, 32768]), &["overlap"]),
        (&|h| h[tensor]["data_offsets"] = json!([u64::MAX - 32768, u64::MAX]), &["beyond any file"]),
        (&|h| drop(h.as_object_mut().unwrap().remove(tensor)), &["not in the file"]),
    ];
    for (edit, words) in cases {
        let copy = Copy::new();
        copy.edit_header(2, edit);
        let message = copy.refusal("2:4");
        assert_names(&message, words);
        assert_names(&message, &[&name, tensor]);
    }
}

#[test]
fn values_that_cannot_be_are_refused() {
    let copy = Copy::new();
    copy.poke(2, "layers.3.ffn.experts.5.w2.scale", 7, &[255]);
    assert_names(&copy.refusal("2:4"), &["layers.3.ffn.experts.5.w2.scale", "scale 7", "255"]);
    copy.open().unwrap().weights(range("2:3")).unwrap().check_values().expect("another layer's scale is not read");

    for id in [8i64, -1, i64::MAX] {
        let copy = Copy::new();
        copy.poke(1, "layers.1.ffn.gate.tid2eid", 16 * 1000 + 8, &id.to_le_bytes());
        assert_names(&copy.refusal("0:2"), &["layers.1.ffn.gate.tid2eid", "token 1000", &id.to_string(), "0 to 7"]);
    }
}

fn mutated(bytes: &[u8], edits: &[(usize, u8)]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for &(at, with) in edits {
        let at = at % out.len();
        out[at] = with;
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_bytes_make_a_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = ModelConfig::parse("config.json", &bytes);
        let _ = parse_index("index", &bytes);
        let _ = ShardHeader::parse("shard", &bytes);
    }

    #[test]
    fn no_edit_of_real_files_makes_a_reader_panic(
        edits in proptest::collection::vec((any::<usize>(), prop_oneof![any::<u8>(), b'0'..=b'9']), 1..6),
        cut in any::<usize>(),
    ) {
        let config = fs::read(Path::new(MODEL).join("config.json")).unwrap();
        let _ = ModelConfig::parse("config.json", &mutated(&config, &edits));
        let index = fs::read(Path::new(MODEL).join("model.safetensors.index.json")).unwrap();
        let _ = parse_index("index", &mutated(&index[..index.len().min(2000)], &edits));
        let shard = fs::read(Path::new(MODEL).join(shard_name(2))).unwrap();
        // Edits fall into the header, where they matter.
        let mut spoiled = mutated(&shard[..17_000], &edits);
        spoiled.extend(&shard[17_000..]);
        spoiled.truncate(spoiled.len() - cut % 1000);
        if let Ok(header) = ShardHeader::parse("shard", &spoiled) {
            for entry in header.tensors.values() {
                prop_assert!(entry.bytes.end <= spoiled.len());
            }
        }
    }

    #[test]
    fn numbers_of_a_config_are_bounded(field in 0usize..40, number in any::<u64>()) {
        let bytes = fs::read(Path::new(MODEL).join("config.json")).unwrap();
        let mut config: BTreeMap<String, Value> = serde_json::from_slice(&bytes).unwrap();
        let numbers: Vec<String> = config.iter().filter(|(_, v)| v.is_number()).map(|(k, _)| k.clone()).collect();
        let key = numbers[field % numbers.len()].clone();
        config.insert(key, json!(number));
        if let Ok(parsed) = ModelConfig::parse("config.json", &serde_json::to_vec(&config).unwrap()) {
            // Shapes of an accepted config can be computed without overflow.
            let _ = ringfence_engine::model::layout::tensors_of(&parsed, ringfence_engine::model::names::Part::Tail);
        }
    }
}
