//! Guesses of coming experts: they reach the store in time and never change a bit.

use std::sync::Mutex;

use shimmer_common::experts::{Ahead, ExpertError, ExpertLayout, Lookahead, RoutedBatch};
use shimmer_common::fixed::FixedRows;

use super::*;

/// Local experts that ask for guesses and write down what happens.
struct Curious {
    inner: Arc<dyn ExpertCompute>,
    events: Mutex<Vec<Event>>,
    ahead: Ahead,
}

#[derive(Clone, Debug, PartialEq)]
enum Event {
    Guess(Lookahead),
    Compute(u16),
}

impl ExpertCompute for Curious {
    fn compute(&self, batch: &RoutedBatch, meanwhile: &mut dyn FnMut()) -> Result<FixedRows, ExpertError> {
        self.events.lock().unwrap().push(Event::Compute(batch.layer));
        self.inner.compute(batch, meanwhile)
    }

    fn layout(&self) -> &ExpertLayout {
        self.inner.layout()
    }

    fn prefetch(&self, ahead: &Lookahead) {
        self.events.lock().unwrap().push(Event::Guess(ahead.clone()));
    }

    fn lookahead(&self) -> Ahead {
        self.ahead
    }
}

fn curious(case: &str, ahead: Ahead) -> (Arc<Curious>, Glm) {
    let experts = local_experts(&container(case), Kernels::best());
    let curious = Arc::new(Curious { inner: experts, events: Mutex::new(Vec::new()), ahead });
    let model = load_glm(case, Some(curious.clone()));
    (curious, model)
}

#[test]
fn guesses_precede_their_layer_and_change_nothing() {
    for case in ["demo-model", "tiny-groups", "colibri-container"] {
        let (curious, model) = curious(case, Ahead::MEANWHILE);
        let plain = load_glm(case, None);
        let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % model.info().vocab_size as u32).collect();
        let run = |model: &Glm| {
            let mut seq = model.new_sequence(true);
            let mut hidden = model.forward(&mut seq, &tokens[..30], None).unwrap().data;
            for &token in &tokens[30..] {
                hidden.extend(model.forward(&mut seq, &[token], None).unwrap().data);
            }
            model.extend_mtp(&mut seq, Some(1), None).unwrap();
            hidden
        };
        assert!(run(&model) == run(&plain), "{case}");

        let events = curious.events.lock().unwrap();
        let mut layer = None;
        let mut guessed = 0;
        for event in events.iter() {
            match event {
                Event::Compute(l) => layer = Some(*l),
                Event::Guess(guess) => {
                    assert!(layer.is_none_or(|l| guess.layer > l || l >= model.info().num_layers as u16 - 1));
                    let mut unique = guess.experts.clone();
                    unique.sort_unstable();
                    unique.dedup();
                    assert!(!unique.is_empty() && unique.len() == guess.experts.len());
                    guessed += 1;
                }
            }
        }
        assert!(guessed > 0, "{case}");
        let stats = model.lookahead();
        assert!(stats[0].used > 0 && stats[0].hits <= stats[0].used && stats[0].guessed >= stats[0].hits);
        let one_ahead = stats[0].ratio().unwrap();
        println!("{case}: recall {:?}", stats.map(|s| s.ratio()));
        // Far above chance (an eighth of the experts is used) on the trained model.
        assert!(case != "demo-model" || one_ahead > 0.4, "{one_ahead}");
    }
}

#[test]
fn guesses_on_text_of_the_trained_model_are_mostly_right() {
    let (_, model) = curious("demo-model", Ahead::MEANWHILE);
    let prompts = json(&data("demo-model").join("expected/prompts.json"));
    for prompt in prompts.as_object().unwrap().values() {
        let mut seq = model.new_sequence(false);
        for key in ["prompt_ids", "greedy_ids"] {
            for id in ids(&prompt[key]) {
                model.forward(&mut seq, &[id], None).unwrap();
            }
        }
    }
    let recall = model.lookahead().map(|recall| recall.ratio().unwrap());
    println!("recall by distance: {recall:.3?}");
    assert!(recall[0] > 0.5 && recall[0] > recall[1] && recall[1] > recall[2], "{recall:?}");
}

#[test]
fn guesses_come_before_the_call_and_no_deeper_where_that_is_wanted() {
    let (curious, model) = curious("demo-model", Ahead { depth: 1, before_sending: true });
    model.forward(&mut model.new_sequence(false), &[3, 1, 4], None).unwrap();
    let events = curious.events.lock().unwrap();
    let mut guessed = std::collections::BTreeSet::new();
    for event in events.iter() {
        match event {
            Event::Guess(guess) => assert!(guessed.insert(guess.layer), "every layer is guessed once"),
            Event::Compute(layer) => {
                let is_last = usize::from(*layer) + 1 == model.info().num_layers;
                assert_eq!(guessed.contains(&(layer + 1)), !is_last, "before the layer is sent");
                assert!(!guessed.contains(&(layer + 2)), "one layer deep");
            }
        }
    }
    assert!(events.len() > 2);
}
