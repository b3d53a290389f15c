//! The sigmoid router with correction bias and groups (docs/model.md §6).

use rayon::prelude::*;
use shimmer_common::container::config::GlmConfig;
use shimmer_common::kernels::Kernels;
use shimmer_common::math;

use crate::model::routed::Routes;
use crate::model::rows::Rows;

/// Rows routed by one task (some 50 µs).
const ROWS_PER_TASK: usize = 16;

/// Chooses experts and weights for every row of `logits` (`[rows, n_routed_experts]`).
pub(super) fn route(kernels: Kernels, config: &GlmConfig, logits: &Rows, bias: &[f32]) -> Routes {
    let k = config.num_experts_per_tok;
    let mut routes = Routes::zeroed(logits.rows(), k);
    let rows = routes.ids.par_chunks_mut(k).zip(routes.gates.par_chunks_mut(k));
    let rows = rows.zip(logits.data.par_chunks(logits.width)).with_min_len(ROWS_PER_TASK);
    rows.for_each(|((ids, gates), logits)| route_row(kernels, config, logits, bias, ids, gates));
    routes
}

/// Chooses the experts `ids`, ascending, and their weights `gates` for one row.
fn route_row(
    kernels: Kernels,
    config: &GlmConfig,
    logits: &[f32],
    bias: &[f32],
    ids: &mut [u16],
    gates: &mut [f32],
) {
    let mut scores = logits.to_vec();
    kernels.sigmoid(&mut scores);
    let mut choice: Vec<f32> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    limit_groups(config, &mut choice);
    // The bias decides who is chosen, never the weight.
    for ((id, gate), chosen) in
        ids.iter_mut().zip(gates.iter_mut()).zip(math::largest(&choice, config.num_experts_per_tok))
    {
        (*id, *gate) = (chosen as u16, scores[chosen as usize]);
    }
    if config.norm_topk_prob {
        let sum = gates.iter().sum::<f32>() + 1e-20;
        gates.iter_mut().for_each(|g| *g /= sum);
    }
    gates.iter_mut().for_each(|g| *g *= config.routed_scaling_factor);
}

/// Bars the experts of all but the `topk_group` best groups. A group scores the sum of its two best.
fn limit_groups(config: &GlmConfig, choice: &mut [f32]) {
    if config.n_group <= 1 {
        return;
    }
    let group_len = choice.len() / config.n_group;
    let scores: Vec<f32> = choice
        .chunks(group_len)
        .map(|group| math::top_k(group, 2).into_iter().map(|i| group[i]).sum())
        .collect();
    let kept = math::top_k(&scores, config.topk_group);
    for (g, group) in choice.chunks_mut(group_len).enumerate() {
        if !kept.contains(&g) {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

#[cfg(test)]
mod tests {
    use shimmer_common::container::config::ModelConfig;

    use super::*;

    fn config(json: &str) -> GlmConfig {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/tiny-groups/config.json");
        let mut value: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let changes: serde_json::Value = serde_json::from_str(json).unwrap();
        value.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        match ModelConfig::parse(value.to_string().as_bytes()).unwrap() {
            ModelConfig::Glm(config) => config,
            ModelConfig::Olmoe(_) => panic!("a GLM configuration"),
        }
    }

    fn route_one(config: &GlmConfig, logits: &[f32], bias: &[f32]) -> Routes {
        route(Kernels::best(), config, &Rows { data: logits.to_vec(), width: logits.len() }, bias)
    }

    #[test]
    fn the_bias_decides_who_is_chosen_but_not_the_weight() {
        let c = config(
            r#"{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 3}"#,
        );
        let routes = route_one(&c, &[0.0, 2.0, 0.0, 1.0], &[34.0, 32.0, 33.5, 33.0]);
        assert_eq!(routes.ids, [0, 2]);
        assert_eq!(routes.gates, [1.5, 1.5]);
    }

    #[test]
    fn ties_go_to_the_lower_expert() {
        let c = config(r#"{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}"#);
        assert_eq!(route_one(&c, &[0.5; 4], &[0.0; 4]).ids, [0, 1]);
    }

    #[test]
    fn only_the_groups_with_the_best_pairs_take_part() {
        let c = config(r#"{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 1}"#);
        // Expert 0 is the best of all, but the pair of group 2 is better than the pair of group 0.
        let routes = route_one(&c, &[3.0, -9.0, 0.0, 0.0, 1.0, 1.5], &[0.0; 6]);
        assert_eq!(routes.ids, [4, 5]);
    }

    #[test]
    fn not_a_number_is_routed_without_panic() {
        for groups in [1, 3] {
            let c = config(&format!(
                r#"{{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": {groups}, "topk_group": 1}}"#
            ));
            assert_eq!(route_one(&c, &[f32::NAN; 6], &[0.0; 6]).ids.len(), 2);
            let one_bad = [0.0, f32::NAN, 1.0, 2.0, 0.5, 0.5];
            assert_eq!(route_one(&c, &one_bad, &[0.0; 6]).ids.len(), 2);
        }
    }
}
