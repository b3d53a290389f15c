//! Placement only decides speed: what `score` writes is byte-equal over instruction sets, prefill
//! chunks, RAM budgets, container and pack, draft settings, and any number of nodes.

use std::path::{Path, PathBuf};

use shimmer_tests::data;
use shimmer_tests::lab::{Lab, NodeOptions};
use shimmer_tests::process::Program;

fn program() -> Program {
    Program::new(env!("CARGO_BIN_EXE_shimmer-e2e"))
}

/// Models of every kind: quantised container, float checkpoint with MTP, FP8, and the second family.
const MODELS: [&str; 4] = ["colibri-container", "tiny-mtp", "tiny-mtp-fp8", "tiny-olmoe"];

/// Scoring runs over one model and one list of token ids.
struct Scorer {
    dir: tempfile::TempDir,
    model: PathBuf,
    runs: std::cell::Cell<usize>,
}

impl Scorer {
    fn new(model: &str) -> Self {
        Self::at(&data(model))
    }

    fn at(model: &Path) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        // 61 tokens below every vocabulary here, twice, as two sequences of different length.
        let ids: Vec<u32> = (0..61).map(|i| (i * i * 7 + 3 * i + 5) % 90).collect();
        std::fs::write(dir.path().join("ids.json"), format!("[{ids:?},{:?}]", &ids[..17])).expect("ids");
        Self { dir, model: model.to_owned(), runs: std::cell::Cell::new(0) }
    }

    /// The bytes `score` writes with these extra flags.
    fn score(&self, extra: &[&str]) -> Vec<u8> {
        self.runs.set(self.runs.get() + 1);
        let out = self.dir.path().join(format!("{}.safetensors", self.runs.get()));
        let mut command = program().command(["score", "--trace", "--model"]);
        command.arg(&self.model).arg("--ids").arg(self.dir.path().join("ids.json"));
        let output = command.arg("--out").arg(&out).args(extra).output().expect("the program starts");
        assert!(output.status.success(), "{extra:?}: {}", String::from_utf8_lossy(&output.stderr));
        std::fs::read(&out).expect("score wrote its file")
    }

    fn assert_equal(&self, reference: &[u8], extra: &[&str]) {
        assert!(self.score(extra) == reference, "{}: other bytes with {extra:?}", self.model.display());
    }
}

/// Instruction sets this CPU has.
fn isas() -> Vec<String> {
    shimmer_common::kernels::Isa::available().iter().map(ToString::to_string).collect()
}

#[test]
fn instruction_sets_chunks_drafts_and_threads() {
    for model in MODELS {
        let scorer = Scorer::new(model);
        let reference = scorer.score(&[]);
        for isa in isas() {
            scorer.assert_equal(&reference, &["--isa", &isa]);
        }
        for chunk in ["1", "7", "64", "100000"] {
            scorer.assert_equal(&reference, &["--prefill-chunk", chunk]);
        }
        for drafts in ["off", "1", "3"] {
            scorer.assert_equal(&reference, &["--draft", drafts]);
        }
        scorer.assert_equal(&reference, &["--threads", "1"]);
    }
}

#[test]
fn ram_budgets_and_packs() {
    for model in MODELS {
        let scorer = Scorer::new(model);
        let reference = scorer.score(&[]);
        let pack = scorer.dir.path().join("pack");
        program().ok([
            "pack".as_ref(),
            "--model".as_ref(),
            scorer.model.as_os_str(),
            "--to".as_ref(),
            pack.as_os_str(),
        ]);
        let pack = pack.to_str().expect("UTF-8");
        let largest = largest_record(&scorer.model);
        for experts in [1, 3, 1000] {
            let budget = format!("{}B", largest * experts);
            scorer.assert_equal(&reference, &["--expert-ram", &budget]);
            scorer.assert_equal(&reference, &["--expert-ram", &budget, "--pack", pack]);
        }
    }
}

fn largest_record(model: &Path) -> usize {
    let container = shimmer_common::container::Container::open(&[model.to_owned()]).expect("a valid model");
    container.experts().layout().max_record_bytes()
}

#[test]
fn one_two_and_three_nodes_of_mixed_instruction_sets() {
    for model in ["colibri-container", "tiny-mtp"] {
        let scorer = Scorer::new(model);
        let reference = scorer.score(&[]);
        let isas = isas();
        for count in 1..=3 {
            let options: Vec<NodeOptions> =
                (0..count).map(|i| NodeOptions { isa: isas[i % isas.len()].clone() }).collect();
            let lab = Lab::start(&program(), &scorer.model, &options);
            scorer.assert_equal(&reference, &lab.flags());
            let mut drafted = lab.flags();
            drafted.extend(["--draft", "3", "--isa", "portable"]);
            scorer.assert_equal(&reference, &drafted);
            let mut alone = lab.flags();
            alone.extend(["--experts", "cluster", "--prefill-chunk", "7"]);
            scorer.assert_equal(&reference, &alone);
        }
    }
}
