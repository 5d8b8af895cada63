//! A rank: the shell that runs it, here or behind ssh, and what the rank prints.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::hosts::Host;
use crate::exit;
use crate::output::OutputError;

/// The longest piece of a rank's output that is printed at once. A longer line is cut into such pieces.
const LONGEST: u64 = 64 << 10;
/// How long the output of a rank that has ended may stay open, because something that it started has it.
const OUTPUT: Duration = Duration::from_secs(2);
/// What ssh exits with if it fails itself.
const SSH_FAILED: i32 = 255;

/// The command line of a shell that reads a script from its standard input.
pub struct Shell(Vec<String>);

impl Shell {
    /// A shell of this host.
    pub fn here() -> Self {
        Shell(vec!["sh".into()])
    }

    /// A shell of another host. `ssh` may have arguments of its own.
    pub fn over(ssh: &str, host: &Host) -> Self {
        let words = ssh.split_whitespace();
        // No question that nobody answers, and no wait for a host that does not.
        let options =
            "-T -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 --";
        let all = words.chain(options.split(' ')).chain([&*host.name, "exec sh"]);
        Shell(all.map(String::from).collect())
    }
}

/// How a rank has ended.
pub enum Ended {
    Well,
    Failed { code: u8, why: String },
}

/// A rank that was started. Dropping it ends it.
pub struct Rank {
    child: Child,
    /// What the shell watches.
    lifeline: Option<ChildStdin>,
    host: Option<Host>,
    status: Option<(ExitStatus, Instant)>,
    /// The threads that print what it says.
    printing: [JoinHandle<()>; 2],
}

impl Rank {
    /// Starts a rank. Errors of standard output and standard error go to `failed`.
    pub fn start(
        Shell(words): Shell,
        script: &[u8],
        host: Option<Host>,
        prefix: Option<String>,
        failed: Sender<OutputError>,
    ) -> Result<Self> {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.process_group(0).spawn().with_context(|| format!("starting a rank by {}", words[0]))?;
        let mut lifeline = child.stdin.take().expect("it is piped");
        let (out, err) =
            (child.stdout.take().expect("it is piped"), child.stderr.take().expect("it is piped"));
        let (prefix, other) = (prefix.unwrap_or_default(), failed.clone());
        let theirs = prefix.clone();
        let printing = [
            std::thread::spawn(move || forward(out, &theirs, &mut std::io::stdout(), &other)),
            std::thread::spawn(move || forward(err, &prefix, &mut std::io::stderr(), &failed)),
        ];
        // A shell that has ended already says itself why.
        match lifeline.write_all(script).and_then(|()| lifeline.flush()) {
            Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(e).context("telling a shell what to run")
            }
            _ => Ok(Rank { child, lifeline: Some(lifeline), host, status: None, printing }),
        }
    }

    /// How the rank has ended; `None` while it runs, and until what it said is printed.
    pub fn ended(&mut self) -> Result<Option<Ended>> {
        if self.status.is_none() {
            let status = self.child.try_wait().context("waiting for a rank")?;
            self.status = status.map(|status| (status, Instant::now()));
        }
        let Some((status, since)) = self.status else { return Ok(None) };
        let printed = self.printing.iter().all(JoinHandle::is_finished) || since.elapsed() > OUTPUT;
        Ok(printed.then(|| self.told(status)))
    }

    fn told(&self, status: ExitStatus) -> Ended {
        let failed =
            |code: i32, why: String| Ended::Failed { code: u8::try_from(code).unwrap_or(exit::FAILED), why };
        match (status.code(), status.signal()) {
            (Some(0), _) => Ended::Well,
            (Some(SSH_FAILED), _) if self.host.is_some() => failed(
                SSH_FAILED,
                "exited with 255: ssh failed, and its own message says why; or the program itself did".into(),
            ),
            // As shells say it.
            (Some(code), _) if code > 128 && code <= 128 + 64 => {
                failed(code, format!("was killed by signal {} (exit status {code})", code - 128))
            }
            (Some(code), _) => failed(code, format!("exited with {code}")),
            (None, signal) => {
                let signal = signal.unwrap_or_default();
                failed(128 + signal, format!("lost its shell, which was killed by signal {signal}"))
            }
        }
    }

    pub fn is_running(&self) -> bool {
        self.status.is_none()
    }

    /// The rank's place in messages: ` on HOST`, or nothing for this host.
    pub fn place(&self) -> String {
        self.host.as_ref().map_or(String::new(), |host| format!(" on {}", host.name))
    }

    /// Asks the rank to end: its shell sends the signals.
    pub fn end(&mut self) {
        self.lifeline = None;
    }

    /// Kills the shell, or ssh.
    pub fn kill(&mut self) {
        if self.is_running() {
            // An error means that it has ended.
            let _ = self.child.kill();
        }
    }
}

/// Prints each line of a rank with the prefix, in one write, until the rank closes its end.
fn forward(from: impl Read, prefix: &str, to: &mut impl Write, failed: &Sender<OutputError>) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    let mut works = true;
    loop {
        line.clear();
        line.extend_from_slice(prefix.as_bytes());
        let before = line.len();
        match (&mut from).take(LONGEST).read_until(b'\n', &mut line) {
            Ok(0) => return,
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted && line.len() == before => continue,
            Err(_) => return,
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        // What nobody takes is read all the same: a rank that can't write would not end.
        if works && let Err(e) = to.write_all(&line).and_then(|()| to.flush()) {
            works = false;
            let _ = failed.send(e.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn every_line_has_a_prefix_and_the_last_one_an_end() {
        let (failed, _errors) = channel();
        let mut out = Vec::new();
        forward(&b"one\n\ntwo"[..], "[3] ", &mut out, &failed);
        assert_eq!(String::from_utf8(out).unwrap(), "[3] one\n[3] \n[3] two\n");
    }

    #[test]
    fn p7_a_line_without_an_end_is_printed_in_pieces() {
        let (failed, _errors) = channel();
        let mut out = Vec::new();
        forward(&vec![b'x'; 2 * LONGEST as usize + 1][..], "", &mut out, &failed);
        let lengths: Vec<_> = out.split(|byte| *byte == b'\n').map(<[u8]>::len).collect();
        assert_eq!(lengths, [LONGEST as usize, LONGEST as usize, 1, 0]);
    }

    #[test]
    fn ssh_is_told_the_host_and_nothing_of_the_job() {
        let hosts = super::super::hosts::of_list("me@a").unwrap();
        let Shell(words) = Shell::over("ssh -p 2222", &hosts[0]);
        assert_eq!(words[..3], ["ssh", "-p", "2222"]);
        assert_eq!(words[words.len() - 3..], ["--", "me@a", "exec sh"]);
        assert!(words.iter().any(|word| word == "BatchMode=yes"));
    }
}
