//! Hosts of tests: network namespaces that a test makes, and programs in them.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{hang, skip};

/// What all hosts know. Without a secret, ranks listen at loopback addresses alone.
pub const SECRET: &str = "a secret that these hosts alone know";

/// Runs `ip` with these arguments, which spaces separate; an error names them.
pub fn ip(arguments: &str) -> Result<Output, String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|e| format!("ip: {e}"))?;
    match output.status.success() {
        true => Ok(output),
        false => Err(format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// Network namespaces with names of their own, in which the loopback device is up. They and what joins them go with this value.
pub struct Namespaces(Vec<String>);

impl Namespaces {
    /// Makes `count` namespaces and has `join` lay the cables between them. `None`, once the reason was told, where this machine gives no
    /// namespaces.
    pub fn new(count: usize, join: impl FnOnce(&[String]) -> Result<(), String>) -> Option<Namespaces> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = format!("pg{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let all = Namespaces((0..count).map(|i| format!("{id}-{i}")).collect());
        let make = || -> Result<(), String> {
            for name in &all.0 {
                ip(&format!("netns add {name}"))?;
                ip(&format!("-n {name} link set lo up"))?;
            }
            join(&all.0)
        };
        make().map_err(|why| skip(&format!("hosts of their own: no network namespaces: {why}"))).ok()?;
        Some(all)
    }

    /// The name of a namespace, as `ip` knows it.
    pub fn name(&self, host: usize) -> &str {
        &self.0[host]
    }

    /// A command in a namespace, with the secret and without other settings of this process's environment.
    pub fn command(&self, host: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.name(host)]).arg(program);
        let is_setting = |name: &str| {
            name.starts_with("PUSHGATE_")
                || name.starts_with("NCCL_SOCKET_")
                || (name.starts_with("_PUSHGATE_") && !name.starts_with("_PUSHGATE_TEST_"))
        };
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_setting)) {
            command.env_remove(name);
        }
        command.env("PUSHGATE_SECRET", SECRET);
        command
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        // Cables go with the namespaces. Some namespaces may not have been made.
        for name in &self.0 {
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

/// A program that runs. It is killed when the test gives up.
pub struct Running {
    child: Child,
    output: [Option<JoinHandle<String>>; 2],
}

impl Running {
    /// Starts a program and reads what it writes all the time: a pipe holds little.
    pub fn start(command: &mut Command) -> Running {
        let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        fn collect(mut from: impl Read + Send + 'static) -> Option<JoinHandle<String>> {
            Some(std::thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = from.read_to_end(&mut bytes);
                String::from_utf8_lossy(&bytes).into_owned()
            }))
        }
        let output =
            [collect(child.stdout.take().expect("piped")), collect(child.stderr.take().expect("piped"))];
        Running { child, output }
    }

    /// Waits for the end: whether the program succeeded, what it printed, and what it wrote as errors.
    pub fn end(mut self) -> (bool, String, String) {
        let begin = Instant::now();
        let status = loop {
            match self.child.try_wait().expect("wait") {
                Some(status) => break status,
                None => assert!(begin.elapsed() < hang(), "a rank hangs"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let [out, err] =
            self.output.each_mut().map(|o| o.take().expect("read once").join().expect("it reads"));
        (status.success(), out, err)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // `ip netns exec` becomes the program, so this is the program itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
