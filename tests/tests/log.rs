//! What programs of a proxy bring into its log: few lines, and none that seem to be others.
//!
//! One test, because all threads of a process log to one place.

use std::time::{Duration, Instant};

use pushgate_driver_shim::bell;
use pushgate_driver_shim::fdpass::send_message;
use pushgate_driver_shim::log::{BURST, PAUSE};
use pushgate_service::wire::{self, Answer, Reply, Request};
use tracing::Level;

#[path = "common/log.rs"]
mod log;
#[path = "common/programs.rs"]
mod programs;

use log::Log;
use programs::*;

/// How often a program is started, and breaks the rules.
const PROGRAMS: usize = 200;
const FORGED: &str = "x\n2026-01-01T00:00:00Z  WARN pushgate: all is lost\u{1b}[2J";

/// A frame whose variant has a long name of several lines.
fn no_request() -> Vec<u8> {
    serde_json::to_vec(&format!("{FORGED}{}", "y".repeat(60_000))).unwrap()
}

#[test]
fn p8_a_program_that_breaks_the_rules_as_fast_as_it_can_brings_few_short_lines_into_the_log() {
    let log = Log::new(Level::INFO);
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let begin = Instant::now();
    let server = server();
    for n in 0..PROGRAMS {
        let stream = server.dial();
        if n % 2 == 0 {
            let (bell, _ringer) = bell::pair().unwrap();
            let (version, newest) = (wire::VERSIONS.oldest(), None);
            let hello = Request::Hello { version, newest, name: FORGED.into() };
            wire::send(&stream, &hello, &[bell.handle()]).unwrap();
            let (reply, _) = wire::recv::<Reply>(&stream).unwrap();
            assert!(matches!(reply, Ok(Answer::Welcome { .. })), "{reply:?}");
        }
        send_message(&stream, &no_request(), &[]).unwrap();
        let (reply, _) = wire::recv::<Reply>(&stream).unwrap();
        let why = format!("{:?}", reply.unwrap_err());
        assert!(why.contains("not a message: unknown variant") && why.len() < 400, "{why}");
    }
    drop(server);
    let lines = log.lines();
    for line in &lines {
        assert!(!line.contains(char::is_control) && line.len() < 500, "{line:?}");
    }
    let passed: Duration = begin.elapsed();
    let most = BURST as usize + passed.as_secs() as usize / PAUSE.as_secs() as usize + 1;
    for kind in ["an engine was started", "left without an engine: not a message", "lost: not a message"] {
        let of_kind = lines.iter().filter(|line| line.contains(kind)).count();
        assert!((1..=most).contains(&of_kind), "{of_kind} of `{kind}` in {passed:?}");
    }
    // And nothing else but the server's own beginning and end.
    assert!(lines.len() <= 3 * most + 4, "{lines:#?}");
    let named = "name=\"x\\n2026-01-01T00:00:00Z  WARN pushgate: all is lost\\u{1b}[2J\"";
    assert!(lines.iter().any(|line| line.contains(named)), "{lines:#?}");
}
