//! Generated tokens are the same with and without drafts, on any number of nodes, and while nodes are
//! killed, frozen and come back.

use std::io::Read;
use std::process::{Child, Stdio};

use serde_json::Value;
use shimmer_tests::data;
use shimmer_tests::lab::{Lab, NodeOptions};
use shimmer_tests::process::Program;

fn program() -> Program {
    Program::new(env!("CARGO_BIN_EXE_shimmer-e2e"))
}

const QUESTION: &str = "Tell me a story about a fox.";

/// Two ways to draw tokens.
const GREEDY: [&str; 1] = ["--greedy"];
const SAMPLED: [&str; 4] = ["--temperature", "0.8", "--seed", "20261129"];

/// The flags of one answer of the demo model, without thinking.
fn answer_flags<'a>(how: &[&'a str], extra: &[&'a str]) -> Vec<&'a str> {
    let mut flags = vec!["run", "--prompt", QUESTION, "--no-think", "--max-tokens", "160"];
    flags.extend_from_slice(how);
    flags.extend_from_slice(extra);
    flags
}

fn model_flag() -> [String; 2] {
    ["--model".to_owned(), data("demo-model").to_str().expect("UTF-8").to_owned()]
}

/// One whole answer as JSON.
fn answer(how: &[&str], extra: &[&str]) -> Value {
    let model = model_flag();
    let mut flags = answer_flags(how, extra);
    flags.extend(model.iter().map(String::as_str));
    flags.push("--json");
    program().json(flags)
}

#[test]
fn the_recorded_greedy_continuation() {
    let prompts: Value = serde_json::from_slice(
        &std::fs::read(data("demo-model/expected/prompts.json")).expect("prompts.json"),
    )
    .expect("JSON");
    let want = prompts["chat"]["greedy_ids"].as_array().expect("ids");
    let got = answer(&GREEDY, &["--draft", "off"]);
    let got = got["ids"].as_array().expect("ids");
    assert!(got.len() >= want.len());
    assert_eq!(&got[..want.len()], &want[..]);
}

#[test]
fn drafts_do_not_change_tokens() {
    for how in [&GREEDY[..], &SAMPLED[..]] {
        let reference = answer(how, &["--draft", "off"]);
        for drafts in ["1", "3", "auto"] {
            let drafted = answer(how, &["--draft", drafts]);
            assert_eq!(drafted["ids"], reference["ids"], "{how:?} with --draft {drafts}");
            assert_eq!(drafted["text"], reference["text"]);
            assert!(drafted["drafts"]["accepted"].as_u64().expect("a count") > 0, "{drafted}");
        }
    }
}

#[test]
fn whether_the_model_thinks_is_always_stated() {
    let silent = answer(&GREEDY, &[]);
    assert_eq!((&silent["thinking"], &silent["reasoning"]), (&Value::Bool(false), &Value::from("")));
    let model = model_flag();
    let default =
        ["run", "--json", "--greedy", "--max-tokens", "60", "--prompt", "What is the capital of Norway?"];
    let flags = default.into_iter().chain(model.iter().map(String::as_str));
    let out = program().output(flags);
    let json: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(json["thinking"], true);
    assert!(json["reasoning"].as_str().is_some_and(|text| !text.is_empty()), "{json}");
    assert!(String::from_utf8_lossy(&out.stderr).contains("thinking: on (the model's default)"));
}

#[test]
fn seeds_matter() {
    let answers: Vec<Value> =
        ["1", "2", "3"].map(|seed| answer(&["--temperature", "1.5", "--seed", seed], &[])).into();
    assert!(answers.windows(2).any(|pair| pair[0]["ids"] != pair[1]["ids"]));
}

/// A streaming answer whose text is read while things happen to the nodes.
struct Streaming {
    child: Child,
    text: Vec<u8>,
}

impl Streaming {
    fn start(how: &[&str], extra: &[&str]) -> Self {
        let model = model_flag();
        let mut flags = answer_flags(how, extra);
        flags.extend(model.iter().map(String::as_str));
        let mut command = program().command(flags);
        let child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        Self { child, text: Vec::new() }
    }

    /// Reads until at least `bytes` bytes of the answer have arrived (or it ended).
    fn read_until(&mut self, bytes: usize) {
        let stdout = self.child.stdout.as_mut().expect("a pipe");
        let mut buffer = [0; 16];
        while self.text.len() < bytes {
            match stdout.read(&mut buffer).expect("readable") {
                0 => break,
                n => self.text.extend_from_slice(&buffer[..n]),
            }
        }
    }

    fn finish(mut self) -> String {
        self.read_until(usize::MAX);
        let mut stderr = String::new();
        self.child.stderr.take().expect("a pipe").read_to_string(&mut stderr).expect("UTF-8");
        assert!(self.child.wait().expect("it ends").success(), "{stderr}");
        String::from_utf8(self.text).expect("UTF-8")
    }
}

fn two_nodes() -> Lab {
    Lab::start(&program(), &data("demo-model"), &[NodeOptions::default(), NodeOptions::default()])
}

#[test]
fn a_node_killed_in_the_middle_of_an_answer() {
    for (how, at) in [(&GREEDY[..], 40), (&SAMPLED[..], 120), (&SAMPLED[..], 1)] {
        let reference = Streaming::start(how, &[]).finish();
        let mut lab = two_nodes();
        let mut streaming = Streaming::start(how, &lab.flags());
        streaming.read_until(at);
        lab.node(0).kill();
        assert_eq!(streaming.finish(), reference, "killed after {at} bytes");
    }
}

#[test]
fn a_node_frozen_in_the_middle_of_an_answer_and_back() {
    for how in [&GREEDY[..], &SAMPLED[..]] {
        let reference = Streaming::start(how, &[]).finish();
        let mut lab = two_nodes();
        let mut streaming = Streaming::start(how, &lab.flags());
        streaming.read_until(30);
        lab.node(1).freeze();
        streaming.read_until(150);
        lab.node(1).thaw();
        assert_eq!(streaming.finish(), reference);
        // The node is a full member again for the next answer.
        let again = answer(how, &lab.flags());
        assert_eq!(again["text"].as_str().map(str::trim_end), Some(reference.trim_end()));
        let served: Vec<u64> = again["experts"]["nodes"]
            .as_array()
            .expect("nodes")
            .iter()
            .map(|node| node["experts"].as_u64().expect("a count"))
            .collect();
        assert!(served.len() == 2 && served.iter().all(|&n| n > 0), "{again}");
    }
}

#[test]
fn a_node_restarted_between_answers_keeps_its_shard() {
    let reference = answer(&SAMPLED, &[]);
    let mut lab = two_nodes();
    lab.node(0).kill();
    let degraded = answer(&SAMPLED, &lab.flags());
    assert_eq!(degraded["ids"], reference["ids"]);
    lab.restart(0);
    let healed = answer(&SAMPLED, &lab.flags());
    assert_eq!(healed["ids"], reference["ids"]);
    assert_eq!(healed["experts"]["fallback"], 0, "{healed}");
}
