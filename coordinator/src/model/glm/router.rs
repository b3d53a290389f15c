//! The sigmoid router with correction bias and groups (docs/model.md §6).

use shimmer_common::container::config::GlmConfig;
use shimmer_common::math;

use crate::model::routed::Routes;
use crate::model::rows::Rows;

/// Chooses experts and weights for every row of `logits` (`[rows, n_routed_experts]`).
pub(super) fn route(config: &GlmConfig, logits: &Rows, bias: &[f32]) -> Routes {
    let mut routes = Routes::default();
    let mut choice = vec![0.0; logits.width];
    for r in 0..logits.rows() {
        let scores: Vec<f32> = logits.row(r).iter().map(|&x| math::sigmoid(x)).collect();
        for (c, (s, b)) in choice.iter_mut().zip(scores.iter().zip(bias)) {
            *c = s + b;
        }
        limit_groups(config, &mut choice);
        let mut ids = math::top_k(&choice, config.num_experts_per_tok);
        ids.sort_unstable();
        // The bias decides who is chosen, never the weight.
        let mut gates: Vec<f32> = ids.iter().map(|&id| scores[id]).collect();
        if config.norm_topk_prob {
            let sum = gates.iter().sum::<f32>() + 1e-20;
            gates.iter_mut().for_each(|g| *g /= sum);
        }
        gates.iter_mut().for_each(|g| *g *= config.routed_scaling_factor);
        routes.push(&ids, &gates);
    }
    routes
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
