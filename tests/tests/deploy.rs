//! The deploy folder against the programs: flags, variables and ports exist and agree, the scripts do what
//! they say. No daemon is needed; linters are in `deploy/check.sh`.
#![cfg(target_os = "linux")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use shimmer_tests::process::Program;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").canonicalize().expect("the deploy folder")
}

fn read(relative: &str) -> String {
    std::fs::read_to_string(folder().join(relative)).unwrap_or_else(|e| panic!("deploy/{relative}: {e}"))
}

/// Every text file of the folder, by its path within it; not the secrets that a trial of compose leaves.
fn files() -> BTreeMap<String, String> {
    fn walk(dir: &Path, found: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.ends_with("containers/secrets") {
                continue;
            }
            if path.is_dir() {
                walk(&path, found);
            } else {
                let name = path.strip_prefix(folder()).expect("below the folder").display().to_string();
                found.insert(name, std::fs::read_to_string(&path).expect("text"));
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(&folder(), &mut found);
    found
}

/// Help of the commands this folder uses, by the words that start them.
fn helps() -> BTreeMap<&'static str, String> {
    let program = Program::new(env!("CARGO_BIN_EXE_shimmer-e2e"));
    let help = |words: &str| program.ok(words.split(' ').chain(["--help"]));
    let mut helps = BTreeMap::new();
    for command in ["serve", "cluster init", "cluster invite", "cluster status", "doctor", "plan"] {
        let words: &'static str = format!("shimmer {command}").leak();
        helps.insert(words, help(command));
    }
    for command in ["join", "start", "status"] {
        let words: &'static str = format!("shimmer-node {command}").leak();
        helps.insert(words, help(&format!("node {command}")));
    }
    helps
}

/// Long flags in `text`, without what follows a `=`.
fn flags(text: &str) -> BTreeSet<String> {
    let is_flag = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    text.split(|c: char| !is_flag(c))
        .filter(|word| word.len() > 3 && word.starts_with("--") && !word.ends_with('-'))
        .map(str::to_owned)
        .collect()
}

/// The part of a command line that belongs to the command: up to a pipe, a redirection, a comment, the end.
fn arguments(rest: &str) -> &str {
    let end = ["`", "|", ">", "#", ")", ";", " --help", "\n"].iter().filter_map(|stop| rest.find(stop)).min();
    &rest[..end.unwrap_or(rest.len())]
}

#[test]
fn every_flag_that_is_used_exists() {
    let helps = helps();
    let mut checked = 0;
    for (file, text) in files() {
        let text = text.replace("\\\n", " ");
        for (words, help) in &helps {
            let known = flags(help);
            for (at, _) in text.match_indices(words) {
                for flag in flags(arguments(&text[at + words.len()..])) {
                    assert!(
                        known.contains(&flag),
                        "deploy/{file} calls `{words}` with {flag}, which it lacks"
                    );
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 20, "only {checked} flags were found in deploy/");
    // The entrypoint collects the flags of `join` in its own arguments.
    let known = flags(&helps["shimmer-node join"]);
    let entrypoint = read("containers/node-entrypoint.sh");
    let collected: BTreeSet<_> =
        entrypoint.lines().filter(|l| l.contains("set -- ")).flat_map(flags).collect();
    assert!(collected.len() >= 7, "{collected:?}");
    assert!(collected.is_subset(&known), "{collected:?} against {known:?}");
}

#[test]
fn every_variable_that_is_set_is_one_of_the_programs() {
    let helps = helps();
    let name_of = |flag: &str| format!("SHIMMER{}", flag[1..].replace('-', "_").to_ascii_uppercase());
    let mut known: BTreeSet<String> = ["shimmer serve", "shimmer cluster init"]
        .iter()
        .flat_map(|c| flags(&helps[c]))
        .map(|f| name_of(&f))
        .collect();
    // Those of shimmer-node itself, those its entrypoint reads, and those compose.yaml takes from the shell.
    assert!(helps["shimmer-node start"].contains("SHIMMER_NODE_DATA"));
    let entrypoint = read("containers/node-entrypoint.sh");
    for name in ["NODE_DATA", "NODE_NAME", "NODE_ADVERTISE", "NODE_RAM", "NODE_PACK", "JOIN_TOKEN_FILE"] {
        assert!(
            entrypoint.contains(&format!("${{SHIMMER_{name}:")),
            "the entrypoint does not read SHIMMER_{name}"
        );
        known.insert(format!("SHIMMER_{name}"));
    }
    for name in ["MODEL_DIR", "MEMORY", "NODE_MEMORY"] {
        assert!(read("containers/compose.yaml").contains(&format!("${{SHIMMER_{name}:")), "SHIMMER_{name}");
        known.insert(format!("SHIMMER_{name}"));
    }
    let is_name = |c: char| c.is_ascii_uppercase() || c == '_';
    for (file, text) in files() {
        // Documents may name a variable that must not be set.
        if file.ends_with(".md") {
            continue;
        }
        for line in text.lines().filter(|line| !line.trim_start().starts_with("# Else")) {
            for word in line.split(|c: char| !is_name(c)).filter(|w| w.starts_with("SHIMMER_")) {
                if word != "SHIMMER_FLAG_NAME" {
                    assert!(known.contains(word), "deploy/{file} sets {word}, which nothing reads");
                }
            }
        }
    }
}

#[test]
fn ports_are_the_programs_own() {
    let helps = helps();
    assert!(helps["shimmer cluster init"].contains("[default: 0.0.0.0:7420]"));
    assert!(helps["shimmer-node join"].contains("[default: 0.0.0.0:7421]"));
    assert!(helps["shimmer serve"].contains("[default: 8000]"));
    for (file, wanted) in [
        ("containers/coordinator.Containerfile", "EXPOSE 8000 7420"),
        ("containers/coordinator-entrypoint.sh", "--listen 0.0.0.0:7420"),
        ("containers/node.Containerfile", "EXPOSE 7421"),
        ("containers/node-entrypoint.sh", "--listen 0.0.0.0:7421"),
        ("containers/compose.yaml", "127.0.0.1:8000:8000"),
        ("containers/compose.yaml", "nc -w 3 127.0.0.1 7421"),
        ("kubernetes/coordinator.yaml", "containerPort: 8000"),
        ("kubernetes/coordinator.yaml", "containerPort: 7420"),
        ("kubernetes/nodes.yaml", "containerPort: 7421"),
        ("kubernetes/nodes.yaml", "value: $(POD_NAME).shimmer-node:7421"),
        ("README.md", "| 7420/tcp | coordinator |"),
        ("README.md", "| 7421/tcp | node |"),
        ("README.md", "| 8000/tcp | coordinator |"),
    ] {
        assert!(read(file).contains(wanted), "deploy/{file} lacks `{wanted}`");
    }
    let policy = read("kubernetes/network-policy.yaml");
    let ports: BTreeSet<&str> =
        policy.lines().filter_map(|l| l.trim_start().strip_prefix("- port: ")).collect();
    assert_eq!(ports, BTreeSet::from(["53", "7420", "7421", "8000"]));
}

#[test]
fn probes_ask_for_what_the_coordinator_serves() {
    assert!(helps()["shimmer serve"].contains("/health"));
    let manifest = read("kubernetes/coordinator.yaml");
    let paths: Vec<&str> = manifest.lines().filter_map(|l| l.trim_start().strip_prefix("path: ")).collect();
    assert_eq!(paths, ["/health"; 3]);
    for file in ["containers/coordinator.Containerfile", "containers/compose.yaml"] {
        assert!(read(file).contains("http://127.0.0.1:8000/health"), "deploy/{file}");
    }
}

#[test]
fn manifests_are_complete_and_keep_to_the_restricted_standard() {
    let list = read("kubernetes/kustomization.yaml");
    let listed: BTreeSet<String> = list
        .lines()
        .filter_map(|l| l.trim().strip_prefix("- ").filter(|l| l.ends_with(".yaml")).map(str::to_owned))
        .collect();
    let all = files();
    let present: BTreeSet<String> = all
        .keys()
        .filter_map(|f| f.strip_prefix("kubernetes/").filter(|f| f.ends_with(".yaml")))
        .filter(|f| *f != "kustomization.yaml")
        .map(str::to_owned)
        .collect();
    assert_eq!(listed, present);
    for (file, text) in all.iter().filter(|(file, _)| file.ends_with(".yaml")) {
        for (number, line) in text.lines().enumerate() {
            let indent = line.len() - line.trim_start_matches(' ').len();
            assert!(!line.contains('\t') && indent % 2 == 0, "deploy/{file}:{}: {line}", number + 1);
        }
    }
    for file in ["kubernetes/coordinator.yaml", "kubernetes/nodes.yaml"] {
        let text = read(file);
        assert_eq!(text.matches("kind: StatefulSet").count(), 1);
        for wanted in [
            // A Service named shimmer would set SHIMMER_PORT=tcp://...
            "enableServiceLinks: false",
            "automountServiceAccountToken: false",
            "runAsNonRoot: true",
            "type: RuntimeDefault",
            "allowPrivilegeEscalation: false",
            "readOnlyRootFilesystem: true",
            "drop: [ALL]",
            "startupProbe:",
            "readinessProbe:",
            "livenessProbe:",
            "volumeClaimTemplates:",
        ] {
            assert!(text.contains(wanted), "deploy/{file} lacks `{wanted}`");
        }
    }
    let nodes = read("kubernetes/nodes.yaml");
    for wanted in
        ["clusterIP: None", "kind: PodDisruptionBudget", "podAntiAffinity:", "serviceName: shimmer-node"]
    {
        assert!(nodes.contains(wanted), "nodes.yaml lacks `{wanted}`");
    }
}

/// The compiler this workspace is built with.
fn toolchain() -> String {
    let path = folder().join("../rust-toolchain.toml");
    let text = std::fs::read_to_string(path).expect("rust-toolchain.toml");
    let channel = text.lines().find_map(|l| l.strip_prefix("channel = "));
    channel.expect("a channel").trim_matches('"').to_owned()
}

#[test]
fn images_hold_nothing_secret() {
    for (file, text) in files() {
        assert!(!text.contains("shimmer1-"), "deploy/{file} holds a join token");
        assert!(!text.contains("PRIVATE KEY"), "deploy/{file} holds a key");
    }
    for file in ["containers/coordinator.Containerfile", "containers/node.Containerfile"] {
        let text = read(file);
        assert!(text.contains(&format!("\nARG RUST_VERSION={}\n", toolchain())), "deploy/{file}");
        assert!(text.contains("\nFROM scratch\n") && text.contains("\nUSER 65532:65532\n"), "deploy/{file}");
    }
}

#[test]
fn units_are_hardened_and_leave_open_what_the_programs_need() {
    for unit in ["systemd/shimmer.service", "systemd/shimmer-node.service"] {
        let text = read(unit);
        let settings: Vec<&str> = text.lines().filter(|l| !l.starts_with('#')).collect();
        for wanted in [
            "NoNewPrivileges=yes",
            "CapabilityBoundingSet=",
            "ProtectSystem=strict",
            "MemoryDenyWriteExecute=yes",
            "SystemCallFilter=@system-service",
            // Not in @system-service: how the page cache is asked.
            "SystemCallFilter=mincore",
            "LimitMEMLOCK=infinity",
            "StateDirectoryMode=0700",
            "UMask=0077",
        ] {
            assert!(settings.contains(&wanted), "deploy/{unit} lacks `{wanted}`");
        }
        // /proc/meminfo is where the RAM budget comes from; the programs do not speak sd_notify.
        for refused in ["ProcSubset=pid", "Type=notify", "DynamicUser=yes"] {
            assert!(!settings.contains(&refused), "deploy/{unit} has `{refused}`");
        }
    }
}

/// A program that answers `--version` as the real one does and notes its arguments in a file.
fn stub(dir: &Path, name: &str) {
    let script = format!(
        "#!/bin/sh\ncase $1 in --version) echo '{name} 0.0.0' ;; *) echo \"$*\" >>{}/calls ;; esac\n",
        dir.display()
    );
    // Made by another process: a child that a parallel test forks must not hold it open for writing.
    let text = dir.join(format!("{name}.txt"));
    std::fs::write(&text, script).expect("a stub");
    let made = Command::new("install").args(["-m", "0755"]).arg(&text).arg(dir.join(name)).status();
    assert!(made.expect("install starts").success());
}

fn install(args: &[&str]) -> Output {
    Command::new("sh").arg(folder().join("install.sh")).args(args).output().expect("sh starts")
}

fn text_of(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// Files below `root` with their content.
fn tree(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten() {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                left.push(path);
            } else {
                let content = std::fs::read(&path).expect("a file");
                found.insert(path.strip_prefix(root).expect("below").to_owned(), content);
            }
        }
    }
    found
}

#[test]
fn the_script_installs_once_and_removes_what_it_installed() {
    let dir = tempfile::tempdir().expect("a directory");
    stub(dir.path(), "shimmer");
    stub(dir.path(), "shimmer-node");
    let root = dir.path().join("root");
    let (from, into) = (dir.path().to_str().expect("UTF-8"), root.to_str().expect("UTF-8"));
    let all = ["--coordinator", "--node", "--lan-only", "--from", from, "--root", into, "--prefix", "/opt/s"];

    let dry = install(&[all.as_slice(), &["--dry-run"]].concat());
    assert!(dry.status.success() && text_of(&dry).contains("would install: /opt/s/bin/shimmer\n"), "{dry:?}");
    assert!(!root.exists(), "a dry run made {}", root.display());

    let first = install(&all);
    assert!(first.status.success(), "{}", text_of(&first));
    let installed = tree(&root);
    let unit = &installed[Path::new("etc/systemd/system/shimmer-node.service")];
    let unit = String::from_utf8_lossy(unit);
    assert!(
        unit.contains("\nExecStart=/opt/s/bin/shimmer-node start --data /var/lib/shimmer-node\n"),
        "{unit}"
    );
    assert!(installed.contains_key(Path::new("etc/systemd/system/shimmer.service.d/lan-only.conf")));
    assert!(installed.contains_key(Path::new("usr/lib/sysusers.d/shimmer.conf")));

    let settings = root.join("etc/shimmer/shimmer.env");
    std::fs::write(&settings, "SHIMMER_MODEL=/mine\n").expect("own settings");
    let before = tree(&root);
    let second = install(&all);
    assert!(second.status.success() && !text_of(&second).contains("installed:"), "{}", text_of(&second));
    assert_eq!(tree(&root), before);

    let removed = install(&["--uninstall", "--root", into, "--prefix", "/opt/s"]);
    assert!(removed.status.success(), "{}", text_of(&removed));
    let left: Vec<PathBuf> = tree(&root).into_keys().collect();
    assert_eq!(left, [PathBuf::from("etc/shimmer/shimmer.env")]);
    let purged = install(&["--uninstall", "--purge", "--root", into]);
    assert!(purged.status.success() && tree(&root).is_empty(), "{}", text_of(&purged));
}

#[test]
fn the_script_refuses_what_it_does_not_understand() {
    for args in [
        vec!["--frobnicate"],
        vec![],
        vec!["--node", "--prefix", "relative"],
        vec!["--node", "--prefix", "/a|b"],
        vec!["--node", "--root", "/"],
        vec!["--node", "--purge"],
        vec!["--node", "--uninstall"],
        vec!["--node", "--from"],
        vec!["--node", "--sha256", "00"],
        vec!["--node", "--root", "/nowhere", "--archive", "https://example.invalid/shimmer.tar.gz"],
        vec!["--node", "--root", "/nowhere", "--archive", "http://example.invalid/shimmer.tar.gz"],
    ] {
        let out = install(&args);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", text_of(&out));
        assert!(text_of(&out).contains("see install.sh --help"), "{args:?}: {}", text_of(&out));
    }
}

#[test]
fn an_archive_is_checked_before_it_is_opened() {
    let dir = tempfile::tempdir().expect("a directory");
    let release = dir.path().join("shimmer-0.0.0");
    std::fs::create_dir(&release).expect("a directory");
    stub(&release, "shimmer-node");
    let archive = dir.path().join("release.tar.gz");
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(dir.path()).arg("-czf").arg(&archive).arg("shimmer-0.0.0");
    assert!(tar.status().expect("tar starts").success());
    let sum = Command::new("sha256sum").arg(&archive).output().expect("sha256sum starts").stdout;
    let sum = String::from_utf8(sum).expect("ASCII").split(' ').next().expect("a sum").to_owned();
    let root = dir.path().join("root");
    let (archive, into) = (archive.to_str().expect("UTF-8"), root.to_str().expect("UTF-8"));

    let args = ["--node", "--root", into, "--archive", archive];
    assert_eq!(install(&args).status.code(), Some(2), "an archive without a checksum was taken");
    let wrong = install(&[args.as_slice(), &["--sha256", &"0".repeat(64)]].concat());
    assert!(wrong.status.code() == Some(1) && text_of(&wrong).contains(&sum), "{}", text_of(&wrong));
    assert!(!root.exists());
    let right = install(&[args.as_slice(), &["--sha256", &sum]].concat());
    assert!(right.status.success(), "{}", text_of(&right));
    assert!(root.join("usr/local/bin/shimmer-node").exists());
}

#[test]
fn a_node_container_joins_once() {
    let dir = tempfile::tempdir().expect("a directory");
    stub(dir.path(), "shimmer-node");
    let (data, token) = (dir.path().join("data"), dir.path().join("token"));
    std::fs::create_dir(&data).expect("a directory");
    std::fs::write(&token, "the-token\n").expect("a token");
    let entrypoint = || {
        let path = format!("{}:/usr/bin:/bin", dir.path().display());
        let out = Command::new("sh")
            .arg(folder().join("containers/node-entrypoint.sh"))
            .env_clear()
            .envs([("PATH", path.as_str()), ("SHIMMER_NODE_RAM", "2GiB")])
            .env("SHIMMER_NODE_DATA", &data)
            .env("SHIMMER_JOIN_TOKEN_FILE", &token)
            .output()
            .expect("sh starts");
        assert!(out.status.success(), "{}", text_of(&out));
        let calls = std::fs::read_to_string(dir.path().join("calls")).expect("calls");
        std::fs::remove_file(dir.path().join("calls")).expect("calls");
        calls
    };
    let data_dir = data.display();
    let join = format!("join the-token --data {data_dir} --listen 0.0.0.0:7421 --no-start --ram 2GiB\n");
    let start = format!("start --data {data_dir}\n");
    assert_eq!(entrypoint(), format!("{join}{start}"));
    // A node that has joined needs no token.
    std::fs::write(data.join("node.json"), "{}").expect("an identity");
    std::fs::remove_file(&token).expect("the token");
    assert_eq!(entrypoint(), start);
}
