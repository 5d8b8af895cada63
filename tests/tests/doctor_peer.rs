//! `pushgate doctor --peer` and `--listen`, over loopback.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use pushgate::settings::PluginSettings;
use pushgate_door::{Purpose, Secret, Terms, dial};
use pushgate_tests::{built, hang};
use serde_json::Value;

const SECRET: &str = "a secret that both hosts know";

fn command(secret: Option<&str>) -> Command {
    let mut command = Command::new(built::pushgate());
    for key in PluginSettings::keys() {
        command.env_remove(key.variable());
    }
    command
        .env_remove("PUSHGATE_CONFIG")
        .env_remove("PUSHGATE_LOG")
        .env_remove("PUSHGATE_SECRET")
        .arg("doctor");
    if let Some(secret) = secret {
        command.env("PUSHGATE_SECRET", secret);
    }
    command
}

/// A `pushgate doctor --listen`, ended with the value.
struct Listener {
    child: Child,
    at: String,
    said: BufReader<std::process::ChildStdout>,
}

impl Listener {
    fn start(secret: Option<&str>, more: &[&str]) -> Listener {
        let mut command = command(secret);
        command.args(["--listen", "127.0.0.1:0"]).args(more).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        let at =
            line.strip_prefix("listening at ").and_then(|l| l.split(';').next()).expect("where it listens");
        let at = at.to_owned();
        Listener { child, at, said }
    }

    /// What it says of the next peer.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn peer(secret: Option<&str>, at: &str, more: &[&str]) -> (Option<i32>, Value) {
    let Output { status, stdout, stderr } =
        command(secret).args(["--peer", at, "--json"]).args(more).output().unwrap();
    let report = serde_json::from_slice(&stdout);
    (status.code(), report.unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&stderr))))
}

fn finding<'a>(report: &'a Value, check: &str) -> &'a Value {
    let found = report["findings"].as_array().unwrap().iter().find(|f| f["check"] == check);
    found.unwrap_or_else(|| panic!("no {check}: {report}"))
}

/// That a peer was not reached, for this reason, with this remedy.
#[track_caller]
fn fails((code, report): (Option<i32>, Value), reading: &str, remedy: &str) {
    assert_eq!((code, &report["failed"]), (Some(2), &1.into()), "{report}");
    let found = finding(&report, "peer-reach");
    let has = |what: &str, text: &str| found[what].as_str().is_some_and(|said| said.contains(text));
    assert!(has("reading", reading) && has("remedy", remedy), "{found}");
}

#[test]
fn two_ends_are_measured_and_compared_in_clear_and_encrypted() {
    for more in [&[][..], &["--tls"]] {
        let mut listener = Listener::start(Some(SECRET), more);
        let (_, report) = peer(Some(SECRET), &listener.at, more);
        for check in ["peer-reach", "peer-version", "peer-mtu", "peer-speed"] {
            assert_eq!(finding(&report, check)["status"], "passed", "{report}");
        }
        let encrypted = finding(&report, "peer-reach")["reading"].as_str().unwrap().contains("encrypted");
        assert_eq!(encrypted, !more.is_empty());
        let measured = &report["peer"];
        assert_eq!(measured["address"], listener.at.as_str());
        assert_eq!(measured["release"], env!("CARGO_PKG_VERSION"));
        assert_eq!(measured["mtu"], measured["peer_mtu"]);
        assert!(measured["mtu"].as_u64().is_some_and(|mtu| mtu >= 1280), "{measured}");
        let number = |name: &str| measured[name].as_f64().unwrap();
        assert!(
            number("least_round_trip_us") > 0.0 && number("least_round_trip_us") <= number("round_trip_us")
        );
        assert!(number("to_peer_gbs") > 0.0 && number("from_peer_gbs") > 0.0, "{measured}");
        // Both ends are one host here.
        let rdma = finding(&report, "peer-rdma")["status"].as_str().unwrap().to_owned();
        assert!(["not_applicable", "passed", "warned"].contains(&&*rdma), "{report}");
        assert!(listener.line().contains(concat!("answered, pushgate ", env!("CARGO_PKG_VERSION"))));
        let text = command(Some(SECRET)).args(["--peer", &listener.at]).args(more).output().unwrap();
        let text = String::from_utf8(text.stdout).unwrap();
        assert!(text.contains("peer-speed") && text.contains("lets this host in"), "{text}");
    }
}

#[test]
fn p8_a_peer_with_another_secret_or_with_nonsense_is_turned_away_and_the_next_is_served() {
    let mut listener = Listener::start(Some(SECRET), &[]);
    let remedy = "one secret on both hosts";
    fails(peer(Some("another secret of many bytes"), &listener.at, &[]), "secret", remedy);
    fails(peer(None, &listener.at, &[]), "secret", remedy);
    fails(peer(Some(SECRET), &listener.at, &["--tls"]), "TLS", "set tls");
    let secret = Secret::new(SECRET.as_bytes()).unwrap();
    let terms = Terms { secret, purpose: Purpose::new("doctor"), tls: false };
    for (greeting, asks) in [
        (&b"{}"[..], None),
        (br#"{"speaks":1,"release":"x","mtu":null,"ports":[]}"#, Some([[9u8; 9]; 2])),
        (
            br#"{"speaks":1,"release":"x","mtu":null,"ports":[]}"#,
            Some([[2, 255, 255, 255, 255, 255, 255, 255, 255]; 2]),
        ),
    ] {
        let stream = dial(listener.at.parse().unwrap(), &terms, greeting, Instant::now() + hang()).unwrap();
        let mut socket = stream.into_plain().unwrap();
        socket.set_nonblocking(false).unwrap();
        if let Some(asks) = asks {
            socket.write_all(&asks.concat()).unwrap();
        }
        // It closes the connection, with what it had to say before.
        let _ = socket.read_to_end(&mut Vec::new());
        let line = listener.line();
        assert!(!line.contains("answered"), "{line}");
    }
    let (_, report) = peer(Some(SECRET), &listener.at, &[]);
    assert_eq!(finding(&report, "peer-speed")["status"], "passed", "{report}");
}

#[test]
fn p7_a_place_where_nobody_or_something_else_listens_is_named_with_a_remedy() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    fails(
        peer(Some(SECRET), &free, &[]),
        "can't be reached",
        &format!("run `pushgate doctor --listen {free}`"),
    );
    // Accepts nobody: the kernel does.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    fails(peer(Some(SECRET), &silent.local_addr().unwrap().to_string(), &[]), "in time", "does not answer");
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = other.local_addr().unwrap().to_string();
    let speaks = std::thread::spawn(move || {
        let mut socket = other.accept().unwrap().0;
        socket
            .write_all(
                b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n and as many bytes as a hello has",
            )
            .unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
    });
    fails(
        peer(Some(SECRET), &at, &[]),
        "does not speak pushgate's protocol",
        "another program listens there",
    );
    speaks.join().unwrap();
    fails(peer(Some(SECRET), "no-such-host.invalid", &[]), "", "HOST:PORT");
    // Without a secret other hosts are not even asked.
    fails(peer(None, "192.0.2.1", &[]), "has no secret", "PUSHGATE_SECRET");
}

#[test]
fn without_a_secret_it_listens_on_loopback_alone() {
    let listener = Listener::start(None, &[]);
    let (_, report) = peer(None, &listener.at, &[]);
    assert_eq!(finding(&report, "peer-reach")["status"], "passed", "{report}");
    let refused = command(None).args(["--listen", "0.0.0.0:0"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("listening at 0.0.0.0 takes a secret"), "{said}");
}
