//! `--ram` is kept: resident set and page cache stay within the budget in every phase, under a memory
//! limit a little above it, for budgets from the least that works up.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use shimmer_tests::cgroup::{MemoryCgroup, peak_resident_bytes};
use shimmer_tests::process::{Program, wait_for};

const MIB: u64 = 1 << 20;

/// More than the budget by 3 %: what a budget may be exceeded by at any time.
fn allowed(ram: u64) -> u64 {
    ram + ram * 3 / 100
}

/// More than the budget by 5 %: where the kernel begins to kill.
fn limit(ram: u64) -> u64 {
    ram + ram / 20
}

fn program() -> Program {
    Program::new(env!("CARGO_BIN_EXE_shimmer-e2e"))
}

/// 4 layers of 48 experts of 0.4 MB, and an MTP layer of larger ones: more than what else there is, so that
/// budgets matter.
fn model(dir: &Path) -> String {
    let to = dir.join("model").to_str().expect("UTF-8").to_owned();
    let shape = "--preset tiny --layers 5 --dense-layers 1 --experts 48 --top-k 4 --hidden 512 --expert-inner 512 --mtp";
    program().ok(["synth", "--to", &to].into_iter().chain(shape.split(' ')));
    to
}

/// The least budget the refusal of a tiny one names, in bytes.
fn least(model: &str) -> u64 {
    let refusal =
        program().refused(2, &["--ram"], ["run", "--model", model, "--prompt", "x", "--ram", "1MiB"]);
    let suggested = refusal.split("give --ram ").nth(1).and_then(|rest| rest.split("MiB").next());
    suggested.and_then(|mib| mib.parse::<u64>().ok()).expect("a budget in MiB") * MIB
}

fn prompt(words: usize) -> String {
    (0..words).map(|i| format!("w{} ", i * 7 % 90)).collect()
}

/// A process in a cgroup, and the most its resident set and its page cache took together.
struct Watched {
    child: Child,
    peak: u64,
}

impl Watched {
    fn start(cgroup: &MemoryCgroup, command: &Command) -> Self {
        let mut command = cgroup.command(command);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("sh starts");
        Self { child, peak: 0 }
    }

    fn look(&mut self, cgroup: &MemoryCgroup) {
        // Pages of the program that another process brought in are charged to that one but count here.
        let resident = peak_resident_bytes(self.child.id()).unwrap_or(0);
        self.peak = self.peak.max(resident + cgroup.cache_bytes()).max(cgroup.peak_bytes());
    }

    /// Waits for the end; stdout.
    fn finish(mut self, cgroup: &MemoryCgroup, ram: u64) -> String {
        let mut out = self.child.stdout.take().expect("piped");
        let mut err = self.child.stderr.take().expect("piped");
        let out = std::thread::spawn(move || {
            let mut text = String::new();
            out.read_to_string(&mut text).map(|_| text)
        });
        let err = std::thread::spawn(move || {
            let mut text = String::new();
            err.read_to_string(&mut text).map(|_| text)
        });
        let status = wait_for("the program", || {
            self.look(cgroup);
            self.child.try_wait().expect("a child")
        });
        let text = out.join().expect("a reader").expect("UTF-8");
        let errors = err.join().expect("a reader").expect("UTF-8");
        assert!(status.success(), "{status:?} with {} MiB, {} killed: {errors}", ram / MIB, cgroup.kills());
        self.within(ram);
        text
    }

    fn within(&self, ram: u64) {
        assert!(self.peak > 0, "nothing was measured");
        println!("{} KiB of {} KiB were taken", self.peak / 1024, ram / 1024);
        assert!(
            self.peak <= allowed(ram),
            "{} KiB were taken of {} KiB ({:.1} %)",
            self.peak / 1024,
            ram / 1024,
            self.peak as f64 * 100.0 / ram as f64
        );
    }
}

#[test]
fn every_budget_from_the_least_up_is_kept_and_gives_the_same_answer() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let model = model(dir.path());
    let least = least(&model);
    let run = |ram: u64| {
        let ram = format!("{}MiB", ram / MIB);
        let prompt = prompt(60);
        program().command([
            "run",
            "--json",
            "--max-tokens",
            "12",
            "--seed",
            "3",
            "--model",
            &model,
            "--ram",
            &ram,
            "--prompt",
            &prompt,
        ])
    };
    let below = run(least - MIB).output().expect("the program starts");
    assert_eq!(below.status.code(), Some(2), "a MiB below the least is refused");
    let mut answers = Vec::new();
    for ram in [least, least + 8 * MIB, least + 40 * MIB, least + 400 * MIB] {
        let Some(cgroup) = MemoryCgroup::with_limit(limit(ram)) else { return };
        let text = Watched::start(&cgroup, &run(ram)).finish(&cgroup, ram);
        let answer: Value = serde_json::from_str(&text).expect("JSON");
        answers.push(answer["ids"].clone());
        assert_eq!(cgroup.kills(), 0);
    }
    assert!(!answers[0].as_array().expect("ids").is_empty());
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
}

#[test]
fn a_conversion_takes_little_whatever_the_model() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let from = dir.path().join("bf16").to_str().expect("UTF-8").to_owned();
    let shape = "--preset tiny --layers 7 --dense-layers 1 --experts 32 --hidden 512 --expert-inner 512 \
                 --expert-format bf16 --dense-format bf16 --embedding-format bf16 --indexer-format bf16";
    program().ok(["synth", "--to", &from].into_iter().chain(shape.split_whitespace()));
    // The source has 300 MB.
    let ram = 128 * MIB;
    let Some(cgroup) = MemoryCgroup::with_limit(limit(ram)) else { return };
    let to = dir.path().join("converted");
    let command = program().command(["convert", "--from", &from, "--to", to.to_str().expect("UTF-8")]);
    Watched::start(&cgroup, &command).finish(&cgroup, ram);
    assert_eq!(cgroup.kills(), 0);
}

/// Serves within `ram` for `time`: prompts of all lengths.
fn serve_mixed(time: Duration) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let model = model(dir.path());
    let ram = least(&model) + 40 * MIB;
    let Some(cgroup) = MemoryCgroup::with_limit(limit(ram)) else { return };
    let budget = format!("{}MiB", ram / MIB);
    let command = program().command(["serve", "--json", "--port", "0", "--model", &model, "--ram", &budget]);
    let mut server = Watched::start(&cgroup, &command);
    let mut line = String::new();
    BufReader::new(server.child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    let address: Value = serde_json::from_str(&line).expect("JSON");
    let address = address["address"].as_str().expect("an address").to_owned();

    let begun = Instant::now();
    let mut first = None;
    for round in 0.. {
        let words = [60, 10, 200, 1][round % 4];
        let answer = ask(&address, &prompt(words));
        server.look(&cgroup);
        if round % 4 == 0 {
            assert_eq!(*first.get_or_insert_with(|| answer.clone()), answer, "round {round}");
        }
        if round >= 9 && begun.elapsed() >= time {
            break;
        }
    }
    server.within(ram);
    assert_eq!(cgroup.kills(), 0);
    server.child.kill().expect("a running server");
    server.child.wait().expect("a child");
}

/// The text of a completion.
fn ask(address: &str, prompt: &str) -> String {
    let body = serde_json::json!({
        "messages": [{ "role": "user", "content": prompt }], "max_tokens": 8, "seed": 1, "temperature": 0.7
    })
    .to_string();
    let mut stream = TcpStream::connect(address).expect("a connection");
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
    .expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    let body = body.trim_start_matches(|c: char| c != '{');
    let end = body.rfind('}').map_or(0, |end| end + 1);
    let body: Value = serde_json::from_str(&body[..end]).expect("JSON");
    body["choices"][0]["message"].to_string()
}

#[test]
fn a_server_keeps_its_budget() {
    serve_mixed(Duration::ZERO);
}

#[test]
#[ignore = "takes ten minutes; run with --ignored"]
fn a_server_keeps_its_budget_for_ten_minutes() {
    serve_mixed(Duration::from_secs(600));
}
