//! One spelling of tensor names, and whose tensor it is.
//!
//! Released checkpoints spell names in two ways; everything behind this file uses the short one
//! (`layers.0.attn.wq_a.scale`).

/// The part of the model a tensor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The embedding.
    Embed,
    /// A layer of the target model.
    Layer(u16),
    /// Final norm, head and `hc_head`.
    Tail,
    /// A draft stage.
    Draft(u16),
    /// A copy or an extra that is never read.
    Other,
}

/// The project's spelling of a released tensor name.
#[must_use]
pub fn normalize(raw: &str) -> String {
    let name = raw.strip_prefix("model.").unwrap_or(raw);
    let mut parts: Vec<&str> = name.split('.').map(short).collect();
    if let [.., last] = parts.as_mut_slice()
        && *last == "weight_scale_inv"
    {
        *last = "scale";
    }
    parts.join(".")
}

fn short(part: &str) -> &str {
    match part {
        "embed_tokens" => "embed",
        "lm_head" => "head",
        "self_attn" => "attn",
        "mlp" => "ffn",
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "gate_proj" => "w1",
        "down_proj" => "w2",
        "up_proj" => "w3",
        "e_score_correction_bias" => "bias",
        "tie2eid" => "tid2eid",
        other => other,
    }
}

/// Whose tensor a normalized name is.
#[must_use]
pub fn part_of(name: &str) -> Part {
    let mut parts = name.split('.');
    match parts.next() {
        Some("embed") => Part::Embed,
        Some("layers") => parts.next().and_then(|n| n.parse().ok()).map_or(Part::Other, Part::Layer),
        Some("mtp") => {
            let stage = parts.next().and_then(|n| n.parse().ok());
            match (stage, parts.next()) {
                (_, Some("embed" | "emb" | "head") | None) | (None, _) => Part::Other,
                (Some(stage), Some(_)) => Part::Draft(stage),
            }
        }
        Some("norm" | "head" | "hc_head_fn" | "hc_head_base" | "hc_head_scale") => Part::Tail,
        _ => Part::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_become_one() {
        for (long, name) in [
            ("model.layers.3.self_attn.wq_a.weight_scale_inv", "layers.3.attn.wq_a.scale"),
            ("model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
            ("model.layers.0.mlp.gate.tie2eid", "layers.0.ffn.gate.tid2eid"),
            ("model.layers.0.mlp.experts.7.down_proj.weight", "layers.0.ffn.experts.7.w2.weight"),
            ("model.embed_tokens.weight", "embed.weight"),
            ("lm_head.weight", "head.weight"),
            ("model.norm.weight", "norm.weight"),
            ("layers.1.attn.compressor.norm.weight", "layers.1.attn.compressor.norm.weight"),
        ] {
            assert_eq!(normalize(long), name);
            assert_eq!(normalize(name), name, "the short spelling stays");
        }
    }

    #[test]
    fn parts_are_told_and_draft_copies_skipped() {
        assert_eq!(part_of("embed.weight"), Part::Embed);
        assert_eq!(part_of("layers.12.attn_norm.weight"), Part::Layer(12));
        assert_eq!(part_of("hc_head_fn"), Part::Tail);
        assert_eq!(part_of("mtp.2.norm.weight"), Part::Draft(2));
        assert_eq!(part_of("mtp.0.head.weight"), Part::Other);
        assert_eq!(part_of("mtp.0.embed.weight"), Part::Other);
        assert_eq!(part_of("layers.x.norm"), Part::Other);
        assert_eq!(part_of("mtp"), Part::Other);
    }
}
