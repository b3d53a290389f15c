//! Import of colibrì's `.coli_usage` (docs/formats.md): lines of `layer expert count`, with optional headers
//! `-1 layers experts` and `-2 version hash`. It is read once, where there is no file of our own, and never
//! written: the user may go back.

use super::super::ExpertLayout;
use super::counts::{Counts, HORIZONS, SavedLayer, SavedUsage};

/// Its name in a model directory.
pub const FILE_NAME: &str = ".coli_usage";

/// Most bytes of such a file: GLM-5.2's has some 400 KB.
pub const MAX_BYTES: u64 = 64 << 20;

/// FNV-1a of the engine names whose layer and expert numbers are ours.
const KNOWN: [(&str, u32); 1] = [("glm_moe_dsa", 3_815_245_270)];

/// An imported history counts as if it were so many tokens old and long: enough to rank, little enough to be
/// overruled by what is seen here.
const IMPORTED_TOKENS: f64 = 500.0;

/// What was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Imported {
    /// Counts, each layer scaled to the same number of tokens; `None` when there were none.
    pub usage: Option<SavedUsage>,
    /// Sentences for the user.
    pub warnings: Vec<String>,
}

/// Reads the file's bytes for a model of this layout.
///
/// # Errors
/// A sentence: the file is of another kind or another model.
pub fn import(bytes: &[u8], layout: &ExpertLayout, topk: usize) -> Result<Imported, String> {
    if bytes.starts_with(b"IKU1") {
        return Err("it is a binary file of another model family".to_owned());
    }
    let text = std::str::from_utf8(bytes).map_err(|_| "it is no text".to_owned())?;
    let mut imported = Imported::default();
    let mut counts: Vec<SavedLayer> = layout
        .layers
        .iter()
        .map(|(&layer, experts)| SavedLayer { layer, experts: vec![Counts::default(); experts.len()] })
        .collect();
    let (mut bad_lines, mut outside) = (0u64, 0u64);
    for line in text.lines() {
        let mut numbers = line.split_whitespace().map(str::parse::<i64>);
        let fields = (numbers.next(), numbers.next(), numbers.next(), numbers.next());
        match fields {
            (None, ..) => {}
            (Some(Ok(-1)), Some(Ok(layers)), Some(Ok(experts)), None) => header(layers, experts, layout)?,
            (Some(Ok(-2)), Some(Ok(_)), Some(Ok(hash)), None) => {
                if !KNOWN.iter().any(|&(_, known)| i64::from(known) == hash) {
                    imported
                        .warnings
                        .push("it was written for a model kind this program does not know".into());
                }
            }
            (Some(Ok(layer)), Some(Ok(expert)), Some(Ok(count)), None) => {
                let slot = counts
                    .iter_mut()
                    .find(|l| i64::from(l.layer) == layer)
                    .and_then(|l| l.experts.get_mut(usize::try_from(expert).ok()?));
                match slot {
                    Some([sum, ..]) if (0..=i64::from(u32::MAX)).contains(&count) => *sum += count as f64,
                    _ => outside += 1,
                }
            }
            _ => bad_lines += 1,
        }
    }
    if bad_lines + outside > 0 {
        let what =
            format!("{bad_lines} unreadable lines and {outside} of experts this model lacks were left out");
        imported.warnings.push(what);
    }
    let mut any = false;
    for layer in &mut counts {
        let total: f64 = layer.experts.iter().map(|[sum, ..]| sum).sum();
        any |= total > 0.0;
        for counts in &mut layer.experts {
            let [sum, ..] = *counts;
            let share = if total > 0.0 { sum / total * topk as f64 } else { 0.0 };
            *counts = [share * IMPORTED_TOKENS; HORIZONS];
        }
    }
    if any {
        let tokens = [IMPORTED_TOKENS; HORIZONS];
        imported.usage = Some(SavedUsage { lifetime_tokens: IMPORTED_TOKENS, tokens, layers: counts });
    }
    Ok(imported)
}

/// `-1 layers experts`: layers of the main model, experts per layer.
fn header(layers: i64, experts: i64, layout: &ExpertLayout) -> Result<(), String> {
    let ours = layout.layers.values().map(Vec::len).max().unwrap_or(0);
    // The last sparse layer is the model's last, or the MTP layer behind it.
    let last = layout.layers.keys().max().map_or(0, |&layer| i64::from(layer));
    if experts != ours as i64 || !(last..=last + 1).contains(&layers) {
        return Err(format!(
            "it is of a model with {layers} layers of {experts} experts; this one has {ours} experts and layers up to {last}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::testing::MemorySource;

    fn read(text: &str) -> Result<Imported, String> {
        // Layers 1 and 2 of four experts each.
        import(text.as_bytes(), &MemorySource::new(4, 64, 64).layout, 2)
    }

    #[test]
    fn counts_are_scaled_per_layer() {
        let found = read("-1 3 4\n-2 1 3815245270\n1 0 30\n1 3 10\n2 2 4000000000\n").unwrap();
        assert_eq!(found.warnings, Vec::<String>::new());
        let usage = found.usage.unwrap();
        let layer =
            |at: usize| usage.layers[at].experts.iter().map(|counts| counts[2] / 500.0).collect::<Vec<_>>();
        assert_eq!((layer(0), layer(1)), (vec![1.5, 0.0, 0.0, 0.5], vec![0.0, 0.0, 2.0, 0.0]));
    }

    #[test]
    fn an_empty_file_is_no_history() {
        assert_eq!(read("").unwrap(), Imported::default());
        assert_eq!(read("1 2 0\n").unwrap().usage, None);
    }

    #[test]
    fn odd_lines_are_left_out_with_a_warning() {
        let found = read("1 0 5\n1 9 5\n7 0 5\nnonsense\n1 0\n1 1 -3\n1 1 1 1\n").unwrap();
        assert!(found.usage.is_some());
        assert_eq!(found.warnings.len(), 1);
        assert!(found.warnings[0].contains("3 unreadable lines and 3 of experts"), "{}", found.warnings[0]);
    }

    #[test]
    fn other_models_and_kinds_are_refused() {
        assert!(read("-1 3 8\n1 0 5\n").unwrap_err().contains("8 experts"));
        assert!(read("-1 9 4\n").is_err());
        assert!(read("IKU1\0\u{1}").unwrap_err().contains("another model family"));
        assert!(import(&[0xff, 0xfe], &MemorySource::new(4, 64, 64).layout, 2).is_err());
        assert_eq!(read("-2 1 77\n1 0 5\n").unwrap().warnings.len(), 1);
    }
}
