//! The demo model inside this executable: a real, small `glm_moe_dsa` checkpoint made by
//! `shimmer convert` (its card says how it was trained and what it may be used for).

use std::path::Path;

use super::error::CliError;

/// Name and content of every file, the model card included.
const FILES: [(&str, &[u8]); 9] = [
    ("MODEL_CARD.md", include_bytes!("../../assets/demo-model/MODEL_CARD.md")),
    ("config.json", include_bytes!("../../assets/demo-model/config.json")),
    ("generation_config.json", include_bytes!("../../assets/demo-model/generation_config.json")),
    ("tokenizer.json", include_bytes!("../../assets/demo-model/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../assets/demo-model/tokenizer_config.json")),
    ("chat_template.jinja", include_bytes!("../../assets/demo-model/chat_template.jinja")),
    ("out-00000.safetensors", include_bytes!("../../assets/demo-model/out-00000.safetensors")),
    ("out-idx-00000.safetensors", include_bytes!("../../assets/demo-model/out-idx-00000.safetensors")),
    ("out-mtp-00000.safetensors", include_bytes!("../../assets/demo-model/out-mtp-00000.safetensors")),
];

/// Writes the model into the empty directory `dir` and compares what the disk gives back.
///
/// # Errors
/// [`CliError::Failed`] naming the file.
pub fn unpack(dir: &Path) -> Result<(), CliError> {
    for (name, bytes) in FILES {
        let path = dir.join(name);
        let failed = |e: std::io::Error| {
            CliError::io(format!("cannot unpack the demo model to {}", path.display()), &e)
        };
        std::fs::write(&path, bytes).map_err(failed)?;
        let written = std::fs::read(&path).map_err(failed)?;
        if blake3::hash(&written) != blake3::hash(bytes) {
            return Err(CliError::Failed(format!(
                "{} reads back differently; is the disk full?",
                path.display()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use shimmer_common::container::Container;

    use super::*;

    #[test]
    fn the_embedded_model_is_complete_and_says_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        unpack(dir.path()).unwrap();
        let container = Container::open(&[dir.path().to_owned()]).unwrap();
        assert!(container.has_mtp() && container.has_indexer());
        let card = std::fs::read_to_string(dir.path().join("MODEL_CARD.md")).unwrap();
        assert!(card.contains("toy") && card.contains("licence"));
    }
}
