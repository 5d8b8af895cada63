//! Traces of NCCL's calls: the plugin records what a caller does, and `pushgate bench nccl-trace` replays it. The caller is a replay
//! itself, of traces that are made here.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use pushgate_net_trace::ring::Ring;
use pushgate_net_trace::{End, Memory, Role, What, file_name};
use pushgate_tests::built::{plugin, pushgate, root, scratch};
use pushgate_tests::{hang, output};

/// Two hosts of two GPUs, eight channels.
const RING: Ring = Ring { hosts: 2, gpus: 2, channels: 8, bytes: 256 << 10, rounds: 2 };

/// A folder of a test, with these traces.
struct Traces(PathBuf);

impl Traces {
    fn new(name: &str, ends: &[End]) -> Traces {
        let path = scratch(env!("CARGO_TARGET_TMPDIR")).join(format!("trace-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        ends.iter().for_each(|end| end.write(&path).unwrap());
        Traces(path)
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn player(folder: &Path, arguments: &str) -> Command {
    let mut command = Command::new(pushgate());
    command.args(["bench", "nccl-trace"]).arg(folder).arg("--plugin").arg(plugin());
    command.args(["--host", "127.0.0.1", "--timeout", "60s"]).args(arguments.split_whitespace());
    command
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[track_caller]
fn succeeds(command: &mut Command) -> String {
    let output = output(command, hang());
    assert!(output.status.success(), "{command:?}: {}", text(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A request: bytes, tag and registration of each buffer, and the bytes that it was done with.
type Request = (Vec<(u64, u32, bool)>, Vec<u64>);
/// What an end was asked for: whether it receives, and its requests in the order of the posts.
type Calls = (bool, Vec<Request>);

fn calls(end: &End) -> Calls {
    let mut all: Vec<Request> = Vec::new();
    for event in &end.events {
        match &event.what {
            What::Post { buffers, .. } => {
                all.push((buffers.iter().map(|b| (b.size, b.tag, b.registered)).collect(), Vec::new()));
            }
            What::Done { request, sizes, .. } => all[*request as usize].1 = sizes.clone(),
            _ => {}
        }
    }
    (end.header.role == Role::Receive, all)
}

fn all_calls(ends: &[End]) -> Vec<Calls> {
    let mut all: Vec<_> = ends.iter().map(calls).collect();
    all.sort();
    all
}

/// The plugin's traces of a replay of these.
fn recorded(name: &str, ends: &[End], arguments: &str) -> Vec<End> {
    let (from, to) = (Traces::new(name, ends), Traces::new(&format!("{name}-again"), &[]));
    succeeds(player(&from.0, arguments).env("PUSHGATE_NET_TRACE", &to.0));
    let again = pushgate_net_trace::folder(&to.0).unwrap();
    // What was recorded can be replayed.
    succeeds(&mut player(&to.0, arguments));
    again
}

#[test]
fn the_recorder_writes_what_the_caller_did_and_the_player_replays_it_again() {
    let made = RING.ends();
    for qp in ["tcp", "local"] {
        let again = recorded(qp, &made, &format!("--qp {qp} --runs 1 --check-all"));
        assert_eq!(all_calls(&again), all_calls(&made), "{qp}");
        for end in &again {
            let has = |is: &dyn Fn(&What) -> bool| end.events.iter().filter(|e| is(&e.what)).count();
            assert_eq!(has(&|w| *w == What::Closed { left_out: 0 }), 1);
            assert_eq!(has(&|w| *w == What::Made), 1);
            assert_eq!(has(&|w| *w == What::Listen), usize::from(end.header.role == Role::Receive));
            let registered = |w: &What| matches!(w, What::Register { memory: Memory::Host, .. });
            let deregistered = |w: &What| matches!(w, What::Deregister { .. });
            assert!(has(&registered) > 0 && has(&registered) == has(&deregistered));
            // The time lies on one line for all of a host.
            let closed = end.events.last().unwrap();
            assert!(matches!(closed.what, What::Closed { .. }) && closed.time > end.events[0].time);
        }
        let processes = |ends: &[End]| {
            let mut all: Vec<_> = ends.iter().map(|end| end.header.process).collect();
            all.dedup();
            all.len()
        };
        assert_eq!(processes(&again), 4);
    }
}

#[test]
fn receives_of_several_buffers_and_tags_and_empty_messages_are_recorded_and_replayed() {
    let mut made = Ring { hosts: 2, gpus: 1, channels: 1, bytes: 64, rounds: 1 }.ends();
    for end in &mut made {
        let base = 1 << 32;
        let receives = end.header.role == Role::Receive;
        let buffer = |tag: u32, size| pushgate_net_trace::Buffer {
            address: base + u64::from(tag) * 65536,
            size,
            tag,
            // The plugin takes no receive without one.
            registered: receives || tag != 3,
        };
        let sizes = [0, 17, 8192, 65_000];
        let posts: Vec<What> = match receives {
            // In another order than the buffers of the receive.
            false => [2, 0, 3, 1]
                .iter()
                .enumerate()
                .map(|(request, tag)| What::Post {
                    request: request as u32,
                    refused: 0,
                    buffers: vec![buffer(*tag, sizes[*tag as usize])],
                })
                .collect(),
            true => vec![What::Post {
                request: 0,
                refused: 0,
                buffers: (0..4).map(|tag| buffer(tag, 65_536)).collect(),
            }],
        };
        let dones = posts.iter().map(|post| {
            let What::Post { request, buffers, .. } = post else { unreachable!("a post") };
            let sizes = buffers.iter().map(|b| sizes[b.tag as usize]).collect();
            What::Done { request: *request, tests: 0, sizes }
        });
        let dones: Vec<_> = dones.collect();
        let event = |time, what| pushgate_net_trace::Event { time, took: 0, thread: 0, what };
        // No post waits for the end of a request.
        let posts = posts.into_iter().map(|what| event(1, what));
        end.events = posts.chain(dones.into_iter().map(|what| event(2, what))).collect();
    }
    let again = recorded("grouped", &made, "--qp local --runs 1 --check-all");
    let mut found = all_calls(&again);
    // NCCL's table lets a plugin answer a send with any size; ours gives the message's.
    found.iter_mut().for_each(|(_, calls)| calls.iter_mut().for_each(|(buffers, _)| buffers.sort()));
    let mut expected = all_calls(&made);
    expected.iter_mut().for_each(|(_, calls)| calls.iter_mut().for_each(|(buffers, _)| buffers.sort()));
    assert_eq!(found, expected);
}

#[test]
fn the_traces_in_the_tree_are_read_and_replayed() {
    let folder = root().join("tests/traces/ring-2x2");
    let script = pushgate_net_trace::folder(&folder).unwrap();
    assert_eq!(all_calls(&script), all_calls(&Ring { rounds: 1, ..RING }.ends()));
    let said = succeeds(&mut player(&folder, "--qp tcp --runs 1 --pace recorded"));
    assert!(said.contains("4 processes, 16 connections, 96 messages of 786432 bytes in all"), "{said}");
}

#[test]
fn a_malformed_trace_is_refused_with_its_file_and_exit_code_2() {
    let made = RING.ends();
    let name = file_name(&made[3].header.process, made[3].header.end);
    for (change, expected) in [
        (&(|bytes: &mut Vec<u8>| bytes.truncate(100)) as &dyn Fn(&mut Vec<u8>), "its last record is cut off"),
        (&|bytes| bytes[8] = 9, "version 9, expected 1"),
        (&|bytes| bytes.clear(), "does not begin as one"),
    ] {
        let folder = Traces::new("malformed", &made);
        let file = folder.0.join(&name);
        let mut bytes = std::fs::read(&file).unwrap();
        change(&mut bytes);
        std::fs::write(&file, bytes).unwrap();
        let output = output(&mut player(&folder.0, "--runs 1"), hang());
        let said = text(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(&name) && said.contains(expected), "{said}");
    }
}

#[test]
fn a_way_for_each_with_and_the_sockets_are_told_with_their_messages() {
    let folder = Traces::new("ways", &Ring { rounds: 1, ..RING }.ends());
    let arguments =
        "--runs 2 --json --with qp=tcp,net-tcp-threads=0 --with qp=tcp,net-tcp-threads=2 --with qp=local";
    let said = succeeds(&mut player(&folder.0, arguments));
    let lines: Vec<serde_json::Value> =
        said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ways: Vec<_> = lines.iter().map(|line| line["way"].as_str().unwrap()).collect();
    assert_eq!(ways, ["sockets", "qp=tcp,net-tcp-threads=0", "qp=tcp,net-tcp-threads=2", "qp=local"]);
    for line in &lines {
        // 16 connections, six messages of 8 KiB each; each turn has all of them.
        assert_eq!(line["received"], 16 * 6 * 8192, "{line}");
        let counts: Vec<_> =
            line["messages"].as_array().unwrap().iter().map(|m| m["count"].clone()).collect();
        assert_eq!(counts, [2 * 16 * 6, 2 * 16 * 6], "{line}");
    }
}
