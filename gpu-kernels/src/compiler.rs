//! A compiler that is a command (g++, nvcc): finding it, and running it on a user's source.

use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::Duration;

use pushgate_driver_shim::interrupt;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::cache::{Cache, Key, Temporary};
use crate::error::{DeviceError, Result};
use crate::source::Source;

/// Between two looks whether the compiler has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// Writes the source for a command-line compiler, whose messages then cite the name that the
/// user knows. The file is removed when the guard is dropped.
pub(crate) fn source_file(cache: &Cache, source: &Source) -> Result<Temporary> {
    let path = cache.temporary("cu");
    let text = format!("#line 1 {:?}\n{}", source.name(), source.body());
    fs::write(&path, text).map_err(|e| DeviceError::Io {
        what: "write the source",
        path: path.clone(),
        source: e,
    })?;
    Ok(Temporary::new(path))
}

/// Runs a compiler; if it fails, what it printed becomes the error.
pub(crate) fn run_compiler(source: &Source, mut command: Command) -> Result<()> {
    let compiler = command.get_program().to_string_lossy().into_owned();
    let io = |what| {
        let path = PathBuf::from(command.get_program());
        move |source| DeviceError::Io { what, path, source }
    };
    let (not_started, not_waited) = (io("start the compiler"), io("wait for the compiler"));
    // A group of its own: a compiler is several processes, which end together.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(not_started)?;
    let (errors, printed) = (text_of(child.stderr.take()), text_of(child.stdout.take()));
    let mut asked = interrupt::Now::begin();
    let ended = loop {
        match child.try_wait() {
            Ok(None) => {}
            ended => break ended.map_err(not_waited)?,
        }
        if let Err(interrupted) = asked.check() {
            // It was not waited for, so the number is its own.
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            let _ = child.wait();
            return Err(interrupted.into());
        }
        std::thread::sleep(PAUSE);
    };
    let text = [errors, printed].map(|text| text.join().unwrap_or_default()).concat();
    match ended {
        Some(status) if status.success() => Ok(()),
        _ => {
            let nothing = || format!("({}, no output)", ended.map(|e| e.to_string()).unwrap_or_default());
            let output = if text.trim().is_empty() { nothing() } else { text };
            Err(DeviceError::Compile { source_name: source.name().to_owned(), compiler, output })
        }
    }
}

/// Reads what a process prints, in a thread.
fn text_of(from: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was printed before an error is told all the same.
        let _ = from.map(|mut from| from.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// A compiler command, with its output for `--version`, which goes into the key.
#[derive(Clone, Debug)]
pub(crate) struct Compiler {
    words: Vec<OsString>,
    version: String,
}

impl Compiler {
    /// Makes a compiler from `words`, the program and its first arguments (`ccache g++`). `None` if
    /// it does not run.
    pub(crate) fn new(words: Vec<OsString>) -> Option<Self> {
        let (program, arguments) = words.split_first()?;
        let output = Command::new(program).args(arguments).arg("--version").output().ok()?;
        if !output.status.success() {
            return None;
        }
        let version = String::from_utf8_lossy(&output.stdout).into_owned();
        Some(Self { words, version })
    }

    /// The C++ compiler: `$CXX`, or else the first of c++, g++, clang++ that runs. Looked for once.
    pub(crate) fn cxx() -> Result<Self> {
        static FOUND: OnceLock<std::result::Result<Compiler, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| {
            let split = |text: OsString| -> Vec<OsString> {
                text.to_string_lossy().split_whitespace().map(OsString::from).collect()
            };
            let named: Option<Vec<OsString>> =
                std::env::var_os("CXX").map(split).filter(|words| !words.is_empty());
            let candidates = match named {
                // A user who names a compiler wants no other.
                Some(words) => vec![words],
                None => ["c++", "g++", "clang++"].map(|name| vec![name.into()]).to_vec(),
            };
            let tried: Vec<String> = candidates
                .iter()
                .map(|words| words.join(" ".as_ref()).to_string_lossy().into_owned())
                .collect();
            candidates.into_iter().find_map(Compiler::new).ok_or_else(|| tried.join(", "))
        });
        found.clone().map_err(|tried| DeviceError::NoCompiler { tried })
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]);
        command
    }

    pub(crate) fn add_to(&self, key: &mut Key) {
        for word in &self.words {
            key.add(word.as_encoded_bytes());
        }
        key.add(self.version.as_bytes());
    }
}
