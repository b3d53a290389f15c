//! The executable as users meet it: exit codes, messages, streams, files, the demo and the server.

#![allow(clippy::unwrap_used, reason = "helpers outside #[test] functions belong to tests as well")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data");

fn data(name: &str) -> String {
    format!("{DATA}/{name}")
}

/// The executable in an empty directory, without the caller's settings.
fn shimmer(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shimmer"));
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("SHIMMER_")) {
        command.env_remove(name);
    }
    command.current_dir(dir).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn run(dir: &Path, args: &[&str]) -> Output {
    shimmer(dir).args(args).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json_of(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs and expects a failure with this code and these words on stderr, nothing on stdout, no panic.
fn refused(dir: &Path, args: &[&str], code: i32, words: &[&str]) {
    let output = run(dir, args);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
    assert!(output.stdout.is_empty(), "{args:?} wrote to stdout");
    assert!(!text.contains("panicked"), "{args:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{args:?}: no {word:?} in {text}");
    }
}

fn temp() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn write_ids(dir: &Path, ids: &Value) -> PathBuf {
    let path = dir.join("ids.json");
    std::fs::write(&path, ids.to_string()).unwrap();
    path
}

#[test]
fn version_and_help_go_to_stdout() {
    let dir = temp();
    let version = run(dir.path(), &["--version"]);
    let text = String::from_utf8(version.stdout).unwrap();
    assert!(version.status.success() && text.starts_with("shimmer ") && text.contains('('), "{text}");
    for command in ["demo", "run", "chat", "serve", "score", "convert", "pack", "plan", "doctor"] {
        let help = run(dir.path(), &[command, "--help"]);
        let text = String::from_utf8(help.stdout).unwrap();
        assert!(help.status.success() && text.contains("Example"), "{command}: {text}");
    }
}

#[test]
fn bad_usage_is_exit_code_2() {
    let dir = temp();
    let model = data("tiny-mtp");
    refused(dir.path(), &["run", "--prompt", "x"], 2, &["--model"]);
    refused(dir.path(), &["run", "--model", &model], 2, &["--prompt"]);
    refused(dir.path(), &["run", "--model", &model, "--prompt", "x", "--ram", "24"], 2, &["24GiB"]);
    refused(dir.path(), &["run", "--model", &model, "--prompt", "x", "--draft", "lots"], 2, &["auto"]);
    refused(
        dir.path(),
        &["run", "--model", &model, "--prompt", "x", "--temperature", "-1"],
        2,
        &["temperature"],
    );
    refused(dir.path(), &["run", "--model", &model, "--prompt", "x", "--grammar", "g"], 2, &["--grammar"]);
    refused(dir.path(), &["run", "--model", &model, "--prompt", "x", "--expert-ram", "1KiB"], 2, &["expert"]);
    refused(
        dir.path(),
        &["run", "--model", &model, "--prompt", "x", "--ram", "1MiB"],
        2,
        &["--ram", "dense"],
    );
    refused(
        dir.path(),
        &["run", "--model", &model, "--prompt", "x", "--experts", "cluster"],
        2,
        &["--cluster"],
    );
    refused(dir.path(), &["serve", "--model", &model, "--host", "0.0.0.0"], 2, &["--api-key-file"]);
    refused(dir.path(), &["chat", "--url", "https://x"], 2, &["http://"]);
    refused(dir.path(), &["chat"], 2, &["--model", "--url"]);
    refused(dir.path(), &["frobnicate"], 2, &["frobnicate"]);
}

#[test]
fn damaged_or_missing_models_are_exit_code_3() {
    let dir = temp();
    refused(dir.path(), &["run", "--model", "no-such-dir", "--prompt", "x"], 3, &["no-such-dir"]);
    let broken = dir.path().join("mödel with space");
    std::fs::create_dir(&broken).unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(format!("{}/{file}", data("tiny-mtp")), broken.join(file)).unwrap();
    }
    let whole = std::fs::read(format!("{}/model.safetensors", data("tiny-mtp"))).unwrap();
    std::fs::write(broken.join("model.safetensors"), &whole[..whole.len() / 2]).unwrap();
    refused(dir.path(), &["plan", "--model", broken.to_str().unwrap()], 3, &["model.safetensors"]);
}

#[test]
fn what_a_run_records_never_replaces_a_file_of_another_kind() {
    let dir = temp();
    let (model, notes) = (data("tiny-mtp"), dir.path().join("notes.txt"));
    std::fs::write(&notes, "mine").unwrap();
    let run_with = ["run", "--model", &model, "--prompt", "x", "--max-tokens", "1"];
    for flag in ["--trace-routes", "--usage"] {
        let args: Vec<&str> = run_with.iter().copied().chain([flag, "notes.txt"]).collect();
        refused(dir.path(), &args, 2, &["notes.txt", "another"]);
    }
    let args: Vec<&str> = run_with.iter().copied().chain(["--usage", "kept"]).collect();
    assert!(run(dir.path(), &args).status.success());
    // Its own kind is replaced.
    assert!(run(dir.path(), &args).status.success());
    let export = ["usage", "export", "--model", &model, "--usage", "kept", "--to"];
    let reset = ["usage", "reset", "--model", &model, "--usage"];
    for (name, words) in [("notes.txt", ["notes.txt", "another"]), ("off", ["--usage off", "leave"])] {
        let args: Vec<&str> = reset.iter().copied().chain([name]).collect();
        refused(dir.path(), &args, 2, &words);
    }
    let to = |name| -> Vec<&str> { export.iter().copied().chain([name]).collect() };
    refused(dir.path(), &to("notes.txt"), 2, &["notes.txt", "another"]);
    for _ in 0..2 {
        assert!(run(dir.path(), &to("exported")).status.success());
    }
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "mine");
}

#[test]
fn unreachable_servers_are_exit_code_4_or_reported_in_the_chat() {
    let dir = temp();
    let mut chat = shimmer(dir.path())
        .args(["chat", "--url", "http://127.0.0.1:1"])
        .env("XDG_STATE_HOME", dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    chat.stdin.take().unwrap().write_all(b"hello\n/quit\n").unwrap();
    let output = chat.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot reach http://127.0.0.1:1"), "{}", stderr(&output));
}

#[test]
fn configuration_files_are_checked_and_shown() {
    let dir = temp();
    std::fs::write(dir.path().join("shimmer.toml"), "ram = \"3GiB\"\n[serve]\nport = 1234\n").unwrap();
    let output = shimmer(dir.path())
        .args(["config", "show", "--json"])
        .env("SHIMMER_ISA", "portable")
        .output()
        .unwrap();
    let shown = json_of(&output);
    assert_eq!(shown["run"]["ram"], json!({ "value": "3GiB", "origin": "file" }));
    assert_eq!(shown["run"]["isa"], json!({ "value": "portable", "origin": "environment" }));
    assert_eq!(shown["serve"]["port"], json!({ "value": "1234", "origin": "file" }));
    assert_eq!(shown["serve"]["host"]["origin"], "default");
    std::fs::write(dir.path().join("shimmer.toml"), "prot = 1\n").unwrap();
    refused(dir.path(), &["config", "show"], 2, &["shimmer.toml", "prot"]);
}

#[test]
fn score_files_are_equal_bytes_whatever_the_chunk_isa_budget_and_source() {
    let dir = temp();
    let model = data("tiny-mtp");
    let ids: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 700).collect();
    let ids = write_ids(dir.path(), &json!([ids, [1, 2, 3]]));
    let ids = ids.to_str().unwrap();
    let pack = run(dir.path(), &["pack", "--model", &model, "--to", "pack", "--json"]);
    assert!(json_of(&pack)["records"].as_u64().unwrap() > 0);
    let score = |name: &str, extra: &[&str]| {
        let mut args = vec!["score", "--model", &model, "--ids", ids, "--out", name, "--trace", "--json"];
        args.extend(extra);
        let output = run(dir.path(), &args);
        assert_eq!(json_of(&output)["predicted"], 41);
        std::fs::read(dir.path().join(name)).unwrap()
    };
    let plain = score("plain", &[]);
    let header = usize::try_from(u64::from_le_bytes(plain[..8].try_into().unwrap())).unwrap();
    let header: Value = serde_json::from_slice(&plain[8..8 + header]).unwrap();
    for name in ["0.logits", "1.logits", "0.hidden.0", "0.router_ids.3", "0.mtp_logits"] {
        assert!(header.get(name).is_some(), "no {name}");
    }
    for (name, extra) in [
        ("chunk1", vec!["--prefill-chunk", "1"]),
        ("chunk7", vec!["--prefill-chunk", "7"]),
        ("portable", vec!["--isa", "portable"]),
        ("drafts", vec!["--draft", "3"]),
        ("threads", vec!["--threads", "1"]),
        ("minimal", vec!["--expert-ram", "100KiB"]),
        ("pack", vec!["--pack", "pack"]),
    ] {
        // Drafts leave no trace of rejected rows, but everything that is written must be the same.
        assert!(score(&format!("{name}.st"), &extra) == plain, "{name} differs");
    }
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|n| !n.to_string_lossy().starts_with('.')), "{left:?}");
}

#[test]
fn bad_ids_are_refused_before_anything_is_written() {
    let dir = temp();
    let model = data("tiny-mtp");
    for (ids, word) in [(json!([1, 768]), "768"), (json!([]), "empty"), (json!(["a"]), "token id")] {
        let file = write_ids(dir.path(), &ids);
        let args = ["score", "--model", &model, "--ids", file.to_str().unwrap(), "--out", "out.st"];
        refused(dir.path(), &args, 2, &[word]);
        assert!(!dir.path().join("out.st").exists());
    }
}

#[test]
fn run_answers_equally_with_and_without_drafts_and_writes_only_the_answer_to_stdout() {
    let dir = temp();
    let model = data("demo-model");
    let ask = |extra: &[&str]| {
        let mut args = vec!["run", "--model", &model, "--prompt", "What is the capital of Norway?"];
        args.extend(extra);
        run(dir.path(), &args)
    };
    let plain = ask(&["--greedy", "--draft", "off", "--json"]);
    let plain = json_of(&plain);
    assert!(plain["text"].as_str().unwrap().contains("Oslo"), "{plain}");
    assert_eq!(plain["finish_reason"], "stop");
    assert!(plain["usage"]["completion_tokens"].as_u64().unwrap() > 3);
    let drafted = json_of(&ask(&["--greedy", "--draft", "3", "--json"]));
    assert_eq!(plain["ids"], drafted["ids"]);
    assert!(drafted["drafts"]["accepted"].as_u64().unwrap() > 0);
    let text = ask(&["--greedy"]);
    assert!(text.status.success());
    assert_eq!(String::from_utf8(text.stdout).unwrap().trim(), plain["text"].as_str().unwrap().trim());
    let seeded = |draft| {
        json_of(&ask(&["--temperature", "0.8", "--seed", "7", "--draft", draft, "--json"]))["ids"].clone()
    };
    assert_eq!(seeded("off"), seeded("3"));
}

#[test]
fn a_closed_stdout_ends_quietly() {
    let dir = temp();
    let mut child = shimmer(dir.path())
        .args(["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
}

#[test]
fn plan_and_doctor_read_a_model() {
    let dir = temp();
    let model = data("colibri-container");
    let given = ["--disk-bandwidth", "1GB", "--memory-bandwidth", "10GB", "--json"];
    let mut args = vec!["plan", "--model", &model];
    args.extend(given);
    let plan = json_of(&run(dir.path(), &args));
    let bytes = &plan["bytes"];
    let parts = [
        "embeddings_head",
        "attention",
        "norms",
        "dense_mlp",
        "shared_experts",
        "router",
        "indexer",
        "mtp_dense",
    ];
    let sum: u64 = parts.iter().map(|p| bytes[*p].as_u64().unwrap()).sum();
    assert_eq!(bytes["resident"].as_u64(), Some(sum));
    assert!(plan["estimate"]["cold_tokens_per_s"].as_f64().unwrap() > 0.0);
    let doctor = run(dir.path(), &["doctor", "--model", &data("demo-model"), "--deep", "--json"]);
    let checks = json_of(&doctor)["checks"].as_array().unwrap().clone();
    assert!(checks.iter().any(|c| c["what"] == "experts" && c["state"] == "ok"), "{checks:?}");
    let failed = run(dir.path(), &["doctor", "--model", "nowhere"]);
    assert_eq!(failed.status.code(), Some(3));
    assert!(String::from_utf8(failed.stdout).unwrap().contains("FAIL"));
    let cluster = run(dir.path(), &["doctor", "--cluster", "nowhere"]);
    assert_eq!(cluster.status.code(), Some(4));
}

#[test]
fn a_cluster_is_made_and_invites() {
    let dir = temp();
    let made = run(dir.path(), &["cluster", "init", "--cluster", "c", "--listen", "127.0.0.1:7420"]);
    assert!(made.status.success(), "{}", stderr(&made));
    refused(dir.path(), &["cluster", "init", "--cluster", "c"], 3, &["already"]);
    let token = json_of(&run(dir.path(), &["cluster", "invite", "--cluster", "c", "--json"]));
    assert_eq!(token["addresses"], json!(["127.0.0.1:7420"]));
    let status = json_of(&run(dir.path(), &["cluster", "status", "--cluster", "c", "--json"]));
    assert_eq!(status["nodes"], json!([]));
    refused(dir.path(), &["cluster", "revoke", "attic", "--cluster", "c"], 3, &["no node attic"]);
}

fn is_running(pid: u64) -> bool {
    // A zombie counts as ended: somebody else reaps it.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

fn within(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not happen within {limit:?}");
        std::thread::yield_now();
    }
}

#[test]
fn the_demo_gives_the_same_tokens_on_no_and_two_nodes_and_leaves_nothing() {
    let dir = temp();
    let demo = |nodes: &str| {
        let args = [
            "demo",
            "--nodes",
            nodes,
            "--prompt",
            "Tell me a story about a fox.",
            "--max-tokens",
            "40",
            "--seed",
            "3",
            "--json",
        ];
        let output = shimmer(dir.path()).args(args).env("TMPDIR", dir.path()).output().unwrap();
        json_of(&output)
    };
    let (alone, two) = (demo("0"), demo("2"));
    assert_eq!(alone["ids"], two["ids"]);
    assert_eq!(two["toy_model"], true);
    let served: u64 =
        two["experts"]["nodes"].as_array().unwrap().iter().map(|n| n["experts"].as_u64().unwrap()).sum();
    assert!(served > 0, "{two}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "temporary files are left");
    for pid in two["node_pids"].as_array().unwrap() {
        let pid = pid.as_u64().unwrap();
        within(Duration::from_secs(10), "the end of a node", || !is_running(pid));
    }
}

/// A running server; killed at the end.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(dir: &Path, extra: &[&str]) -> Self {
        let model = data("demo-model");
        let mut child = shimmer(dir)
            .args(["serve", "--model", &model, "--port", "0", "--json", "--served-model-name", "demo"])
            .args(extra)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = serde_json::from_str::<Value>(&line).unwrap()["address"].as_str().unwrap().to_owned();
        Self { child, address }
    }

    /// Sends one request; status, header block and body (chunk framing left in).
    fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n",
            self.address
        );
        stream.write_all((head + body).as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_owned(), body.to_owned())
    }

    fn post(&self, body: &Value) -> (u16, String, String) {
        self.request("POST", "/v1/chat/completions", "", &body.to_string())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn question() -> Value {
    json!({
        "messages": [{ "role": "user", "content": [{ "type": "text", "text": "What is the capital of Norway?" }] }],
        "temperature": 0, "max_tokens": 60.0, "seed": null, "user": "ignored",
    })
}

/// The JSON documents of an event stream.
fn events(body: &str) -> Vec<Value> {
    let data = body.lines().filter_map(|l| l.strip_prefix("data: ")).filter(|d| *d != "[DONE]");
    data.map(|d| serde_json::from_str(d).unwrap()).collect()
}

#[test]
fn the_server_answers_streams_and_refuses() {
    let dir = temp();
    let server = Server::start(dir.path(), &[]);
    let (status, _, body) = server.request("GET", "/health", "", "");
    assert_eq!((status, body.as_str()), (200, r#"{"status":"ok"}"#));
    let models: Value = serde_json::from_str(&server.request("GET", "/v1/models", "", "").2).unwrap();
    assert_eq!(models["data"][0]["id"], "demo");

    let (status, _, body) = server.post(&question());
    let whole: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, 200, "{body}");
    let message = &whole["choices"][0]["message"];
    assert!(message["content"].as_str().unwrap().contains("Oslo"), "{body}");
    assert!(!message["content"].as_str().unwrap().contains("think>"), "{body}");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let usage = &whole["usage"];
    assert_eq!(
        usage["total_tokens"].as_u64().unwrap(),
        usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap()
    );

    let mut streamed = question();
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({ "include_usage": true });
    let (status, head, body) = server.post(&streamed);
    assert!(status == 200 && head.to_lowercase().contains("text/event-stream"), "{head}");
    assert!(body.contains("data: [DONE]"));
    let chunks = events(&body);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, message["content"].as_str().unwrap());
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], usage["completion_tokens"]);

    for (body, status, code) in [
        ("{", 400, "invalid_json"),
        ("{}", 400, "missing_required_parameter"),
        (r#"{"messages":[]}"#, 400, "invalid_value"),
        (r#"{"messages":[{"role":"wizard","content":"x"}]}"#, 400, "invalid_value"),
        (
            r#"{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}"#,
            400,
            "unsupported_content_type",
        ),
        (r#"{"messages":[{"role":"user","content":"x"}],"temperature":3}"#, 400, "invalid_value"),
        (r#"{"messages":[{"role":"user","content":"x"}],"n":2}"#, 400, "unsupported_parameter"),
        (r#"{"messages":[{"role":"user","content":"x"}],"model":"other"}"#, 404, "model_not_found"),
    ] {
        let (got, _, answer) = server.request("POST", "/v1/chat/completions", "", body);
        let error: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((got, error["error"]["code"].as_str()), (status, Some(code)), "{body}: {answer}");
    }
    let long = json!({ "messages": [{ "role": "user", "content": "word ".repeat(6000) }] });
    assert!(server.post(&long).2.contains("maximum context length"));
    assert_eq!(server.request("GET", "/nowhere", "", "").0, 404);
    assert_eq!(server.request("DELETE", "/v1/models", "", "").0, 405);
    assert_eq!(server.request("GET", "/status", "Origin: https://evil.example\r\n", "").0, 403);
    let status: Value = serde_json::from_str(&server.request("GET", "/status", "", "").2).unwrap();
    assert_eq!(status["totals"]["answered"], 2);
    assert!(server.request("GET", "/", "", "").2.contains("<title>Shimmer"));
}

#[test]
fn keys_are_required_where_they_are_configured() {
    let dir = temp();
    std::fs::write(dir.path().join("keys"), "sesame\n").unwrap();
    let server = Server::start(dir.path(), &["--api-key-file", "keys"]);
    assert_eq!(server.request("GET", "/v1/models", "", "").0, 401);
    assert_eq!(server.request("GET", "/v1/models", "Authorization: Bearer sesame\r\n", "").0, 200);
    assert_eq!(server.request("GET", "/health", "", "").0, 200);
}

#[test]
fn chat_talks_to_a_server() {
    let dir = temp();
    let server = Server::start(dir.path(), &[]);
    let mut chat = shimmer(dir.path())
        .args(["chat", "--url", &format!("http://{}", server.address), "--greedy"])
        .env("XDG_STATE_HOME", dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    chat.stdin.take().unwrap().write_all(b"What is the capital of Norway?\n/save talk.json\n").unwrap();
    let output = chat.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("Oslo"), "{output:?}");
    let saved: Value = serde_json::from_slice(&std::fs::read(dir.path().join("talk.json")).unwrap()).unwrap();
    assert_eq!(saved["messages"].as_array().unwrap().len(), 2);
}

#[cfg(unix)]
#[test]
fn sigterm_ends_the_server_and_ctrl_c_the_run() {
    let dir = temp();
    let mut server = Server::start(dir.path(), &[]);
    let pid = rustix::process::Pid::from_child(&server.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
    let mut second = Server::start(dir.path(), &[]);
    let pid = rustix::process::Pid::from_child(&second.child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(second.child.wait().unwrap().code(), Some(130));
}
