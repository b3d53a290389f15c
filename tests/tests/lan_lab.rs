//! The LAN lab itself: cables, faults and limits are what was asked for, and nothing stays behind.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use shimmer_tests::lan::disk::Disk;
use shimmer_tests::lan::{Host, HostOptions, Lan, LanOptions};
use shimmer_tests::process::wait_for;

const PORT: u16 = 4000;

fn lan(count: usize, host: &HostOptions) -> Option<Lan> {
    Lan::up_or_skip(&LanOptions::uniform(count, host))
}

/// A connection between two hosts, from both ends.
fn connect(from: &Host, to: &Host) -> (TcpStream, TcpStream) {
    let listener = to.inside(|| TcpListener::bind(to.at(PORT)).expect("a free port"));
    let near = from.inside(|| TcpStream::connect(to.at(PORT)).expect("the other host is reached"));
    let (far, _) = listener.accept().expect("a connection");
    for end in [&near, &far] {
        end.set_nodelay(true).expect("TCP_NODELAY");
        end.set_read_timeout(Some(Duration::from_secs(60))).expect("a time-out");
    }
    (near, far)
}

/// The shortest of several round trips of a short message.
fn round_trip(near: &mut TcpStream, far: &mut TcpStream) -> Duration {
    let mut byte = [0];
    let mut one = || {
        let started = Instant::now();
        near.write_all(&[7]).expect("sent");
        far.read_exact(&mut byte).expect("received");
        far.write_all(&byte).expect("sent back");
        near.read_exact(&mut byte).expect("received");
        started.elapsed()
    };
    (0..20).map(|_| one()).min().expect("twenty round trips")
}

/// Time for `bytes` from one end to the other.
fn transfer(near: &mut TcpStream, far: &mut TcpStream, bytes: usize) -> Duration {
    let started = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| near.write_all(&vec![1; bytes]).expect("sent"));
        let mut buffer = vec![0; 1 << 16];
        let mut got = 0;
        while got < bytes {
            got += far.read(&mut buffer).expect("received");
        }
    });
    started.elapsed()
}

#[test]
fn round_trips_and_rates_are_what_was_asked() {
    for (rate_mbit, rtt_us) in [(100.0, 4000.0), (1000.0, 300.0)] {
        let Some(lan) = lan(3, &HostOptions { rate_mbit, rtt_us, ..HostOptions::default() }) else { return };
        let (mut near, mut far) = connect(lan.host(0), lan.host(1));
        let asked = Duration::from_secs_f64(rtt_us / 1e6);
        let rtt = round_trip(&mut near, &mut far);
        assert!((asked..asked + Duration::from_millis(40)).contains(&rtt), "{rtt:?}");

        // 0.8 s and the headers; no machine is too slow for ten times that.
        let bytes = (rate_mbit * 1e5) as usize;
        let before = lan.host(1).stats().expect("counters").received_bytes;
        let took = transfer(&mut near, &mut far, bytes);
        assert!((Duration::from_millis(790)..Duration::from_secs(8)).contains(&took), "{took:?}");
        let on_wire = (lan.host(1).stats().expect("counters").received_bytes - before) as f64;
        println!(
            "{rate_mbit} Mbit/s, {asked:?}: round trip {rtt:?}, {:.1} Mbit/s, {:.3} wire bytes per byte",
            bytes as f64 * 8e-6 / took.as_secs_f64(),
            on_wire / bytes as f64
        );
        assert!((1.03..1.3).contains(&(on_wire / bytes as f64)), "{on_wire} bytes on the wire");
        let third = lan.host(2).stats().expect("counters").received_bytes;
        assert!(third < 100_000, "the third port heard it too");

        lan.host(1).set_rate(20.0).expect("another rate");
        let took = transfer(&mut near, &mut far, 2_500_000);
        assert!(took > Duration::from_millis(790), "2.5 MB at 20 Mbit/s took {took:?}");
    }
}

#[test]
fn lost_frames_cost_time_and_no_data() {
    let Some(lan) = lan(2, &HostOptions::default()) else { return };
    let (near, far) = (lan.host(0), lan.host(1));
    let socket = |host: &Host| {
        host.inside(|| {
            let socket = UdpSocket::bind(host.at(PORT)).expect("a free port");
            socket.set_read_timeout(Some(Duration::from_secs(1))).expect("a time-out");
            socket
        })
    };
    let (from, to) = (socket(near), socket(far));
    let send = |count: usize| {
        for _ in 0..count {
            from.send_to(&[1; 100], far.at(PORT)).expect("sent");
            std::thread::sleep(Duration::from_micros(200));
        }
        std::iter::from_fn(|| to.recv(&mut [0; 200]).ok()).count()
    };
    assert_eq!(send(200), 200, "a good cable loses nothing");
    far.set_loss(500_000).expect("loss");
    let arrived = send(400);
    println!("{arrived} of 400 frames arrived at 50 % loss");
    assert!((120..280).contains(&arrived), "{arrived} of 400");
    far.set_loss(10_000).expect("loss");
    let (mut near, mut far) = connect(near, far);
    transfer(&mut near, &mut far, 1_000_000);
}

#[test]
fn a_cut_cable_is_silence_and_heals() {
    let Some(lan) = lan(2, &HostOptions::default()) else { return };
    let (mut near, mut far) = connect(lan.host(0), lan.host(1));
    lan.host(1).cut().expect("cut");
    near.write_all(&[1]).expect("TCP takes it");
    far.set_read_timeout(Some(Duration::from_millis(500))).expect("a time-out");
    let error = far.read(&mut [0]).expect_err("nothing arrives");
    assert!(matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut), "{error}");
    let mut show = Command::new("ip");
    show.args(["link", "show", "eth0"]);
    let shown = lan.host(1).command(&show).output().expect("ip starts").stdout;
    assert!(String::from_utf8_lossy(&shown).contains("NO-CARRIER"), "the host does not notice");
    lan.host(1).plug().expect("plugged");
    far.set_read_timeout(Some(Duration::from_secs(60))).expect("a time-out");
    assert_eq!(far.read(&mut [0]).expect("TCP sends it again"), 1);
}

fn counting(host: &Host, file: &Path) -> Child {
    let mut count = Command::new("sh");
    count.args(["-c", "while :; do echo; sleep 0.01; done > \"$0\""]).arg(file);
    host.command(&count).stdin(Stdio::null()).spawn().expect("a program starts")
}

#[test]
fn frozen_programs_stand_still_and_killed_ones_are_gone() {
    let Some(lan) = lan(1, &HostOptions::default()) else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("ticks");
    let mut child = counting(lan.host(0), &file);
    let ticks = || std::fs::metadata(&file).map_or(0, |m| m.len());
    wait_for("the first ticks", || (ticks() > 2).then_some(()));
    lan.host(0).freeze().expect("frozen");
    std::thread::sleep(Duration::from_millis(100));
    let before = ticks();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(ticks(), before, "it went on");
    lan.host(0).thaw().expect("thawed");
    wait_for("more ticks", || (ticks() > before + 2).then_some(()));
    lan.host(0).kill();
    assert!(!child.wait().expect("it ended").success());
}

#[test]
fn a_memory_limit_kills_who_exceeds_it() {
    let limit = 64 << 20;
    let Some(lan) = lan(1, &HostOptions { memory_bytes: Some(limit), ..HostOptions::default() }) else {
        return;
    };
    let mut hog = Command::new("sh");
    // The shell keeps what it reads.
    hog.args(["-c", "x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo ${#x}"]);
    let out = lan.host(0).command(&hog).output().expect("it starts");
    assert!(!String::from_utf8_lossy(&out.stdout).starts_with("300000000"), "the limit did not hold");
    assert!(lan.host(0).memory_peak().expect("a peak") <= limit + (1 << 20));
}

#[test]
fn a_slow_disk_is_slow() {
    let Some(lan) = lan(1, &HostOptions::default()) else { return };
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let file = dir.path().join("data");
    std::fs::write(&file, vec![1; 8 << 20]).expect("a file");
    std::fs::File::open(&file).and_then(|file| file.sync_all()).expect("on the disk");
    if let Err(error) = lan.host(0).set_disk_read(dir.path(), Some(8 << 20)) {
        eprintln!("skipped: {error}");
        return;
    }
    let mut read = Command::new("dd");
    read.arg(format!("if={}", file.display())).args(["of=/dev/null", "bs=256k", "iflag=direct"]);
    let started = Instant::now();
    let out = lan.host(0).command(&read).output().expect("dd starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    // 8 MiB at 8 MiB/s.
    assert!(started.elapsed() > Duration::from_millis(700), "{:?}", started.elapsed());
}

#[test]
fn a_disk_fills_up_fails_and_recovers() {
    if Lan::available().is_err() {
        eprintln!("skipped: the LAN lab's disks need root");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let disk = Disk::make(&dir.path().join("disk"), 32 << 20).expect("a disk");
    let file = disk.path().join("data");
    std::fs::write(&file, vec![5; 4 << 20]).expect("room for a file");
    std::fs::File::open(&file).and_then(|file| file.sync_all()).expect("on the disk");

    disk.fill().expect("filled");
    let full = std::fs::write(disk.path().join("more"), vec![5; 4 << 20]).expect_err("no room");
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    disk.free().expect("freed");
    std::fs::write(disk.path().join("more"), vec![5; 4 << 20]).expect("room again");

    let direct = || {
        let mut read = Command::new("dd");
        read.arg(format!("if={}", file.display())).args(["of=/dev/null", "bs=64k", "iflag=direct"]);
        read.output().expect("dd starts")
    };
    assert!(direct().status.success());
    disk.fail(true).expect("failing");
    let said = String::from_utf8_lossy(&direct().stderr).into_owned();
    assert!(said.contains("Input/output error"), "{said}");
    disk.fail(false).expect("well again");
    assert!(direct().status.success());
    assert_eq!(std::fs::read(&file).expect("readable"), vec![5; 4 << 20]);
}

#[test]
fn nothing_stays_behind() {
    let Some(lan) = lan(2, &HostOptions::default()) else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = counting(lan.host(1), &dir.path().join("ticks"));
    lan.host(1).freeze().expect("frozen");
    let here = || {
        let named = |dir: &str| {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            let mine = format!("shimmer-{}-", std::process::id());
            entries.filter(|e| e.file_name().to_string_lossy().starts_with(&mine)).count()
        };
        named("/run/netns") + named("/sys/fs/cgroup") + named("/sys/fs/cgroup/memory")
    };
    assert!(here() > 0);
    drop(lan);
    child.wait().expect("killed, though frozen");
    // Other tests of this process have labs of their own: theirs go, too.
    wait_for("the end of all labs of this process", || (here() == 0).then_some(()));
}

#[test]
fn the_lab_can_be_used_by_hand() {
    if Lan::available().is_err() {
        eprintln!("skipped: the LAN lab needs root");
        return;
    }
    let program = env!("CARGO_BIN_EXE_lan-lab");
    let script = r#"
        set -e
        "$0" exec 1 ip -br addr show eth0
        "$0" set 1 link down
        "$0" exec 1 ip link show eth0
        "$0" set 1 memory 64MiB
        "$0" set 1 colour red 2>&1 || true
        "$0" stats
        echo "$LAB_IP_0"
        exit 7
    "#;
    let mut up = Command::new(program);
    up.args(["up", "2", "--rate", "100,0", "--", "sh", "-c", script, program]);
    let out = up.stdin(Stdio::null()).output().expect("lan-lab starts");
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let wrong = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(7), "the command's own code; {said}{wrong}");
    for part in ["198.18.0.11/24", "NO-CARRIER", "`colour red` cannot be set", "198.18.0.10: sent "] {
        assert!(said.contains(part), "{part} is missing in {said}");
    }
    assert!(said.trim_end().ends_with("198.18.0.10"), "{said}");
}
