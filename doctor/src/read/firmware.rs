//! Words of a NIC's firmware that a vendor's tool tells.

use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::files::text;
use crate::readings::Read;

/// NVIDIA's networking, once Mellanox.
const VENDOR: &str = "0x15b3";
/// The longest that the tool may take.
const LIMIT: Duration = Duration::from_secs(10);
const WORD: &str = "PCI_WR_ORDERING";

/// `PCI_WR_ORDERING` of a function's firmware, such as `per_mkey(0)`; absent: another vendor's, or mlxconfig is not there.
pub fn write_ordering(folder: &Path, address: &str) -> Read<String> {
    match text(&folder.join("vendor")).is().is_some_and(|vendor| vendor == VENDOR) {
        true => ask("mlxconfig".as_ref(), address, LIMIT),
        false => Read::Absent,
    }
}

/// Asks the tool, which takes `limit` at most.
fn ask(tool: &Path, address: &str, limit: Duration) -> Read<String> {
    let mut command = Command::new(tool);
    command.args(["-d", address, "query", WORD]).stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = match command.stdout(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Read::Absent,
        Err(error) => return Read::Unreadable(format!("mlxconfig: {error}")),
    };
    let begin = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if begin.elapsed() < limit => std::thread::sleep(Duration::from_millis(20)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return Read::Unreadable(format!("mlxconfig -d {address} has not ended after {limit:?}"));
            }
        }
    };
    let mut said = String::new();
    // It says a screenful, which a pipe holds.
    let _ = child.stdout.take().map(|out| out.take(1 << 16).read_to_string(&mut said));
    match value(&said) {
        Some(value) => Read::Is(value.into()),
        None => Read::Unreadable(format!("mlxconfig -d {address} query {WORD}: {status}, without the word")),
    }
}

/// The value in what `mlxconfig query` prints: lines of a name and its value for the next boot.
fn value(said: &str) -> Option<&str> {
    said.lines().find_map(|line| {
        line.trim_start_matches(['*', ' ', '\t']).strip_prefix(WORD)?.split_whitespace().next()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_found_among_what_else_is_printed() {
        let said = "Device #1:\n----------\nDevice type:    ConnectX6DX\n\nConfigurations:          Next Boot\n        \
                    PCI_WR_ORDERING          force_relax(1)\n";
        assert_eq!(value(said), Some("force_relax(1)"));
        assert_eq!(value(&said.replace("        PCI", "*       PCI")), Some("force_relax(1)"));
        assert_eq!(value("-E- Failed to open the device\n"), None);
        assert_eq!(value("PCI_WR_ORDERING\n"), None);
    }

    #[test]
    fn a_tool_that_answers_fails_hangs_or_is_not_there_ends() {
        use std::os::unix::fs::OpenOptionsExt as _;

        let folder = std::env::temp_dir().join(format!("pushgate-mlxconfig-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let tool = |name: &str, does: &str| {
            let path = folder.join(name);
            let mut file =
                std::fs::OpenOptions::new().write(true).create_new(true).mode(0o755).open(&path).unwrap();
            std::io::Write::write_all(&mut file, format!("#!/bin/sh\n{does}\n").as_bytes()).unwrap();
            path
        };
        let ask = |tool: &Path, limit| super::ask(tool, "0000:03:00.0", limit);
        let says = tool(
            "says",
            "[ \"$*\" = '-d 0000:03:00.0 query PCI_WR_ORDERING' ] && echo '  PCI_WR_ORDERING  per_mkey(0)'",
        );
        assert_eq!(ask(&says, LIMIT), Read::Is("per_mkey(0)".into()));
        let why = |read: Read<String>| match read {
            Read::Unreadable(why) => why,
            other => panic!("{other:?}"),
        };
        assert!(why(ask(&tool("fails", "exit 3"), LIMIT)).contains("exit status: 3, without the word"));
        assert!(
            why(ask(&tool("hangs", "exec sleep 60"), Duration::from_millis(100))).contains("has not ended")
        );
        assert_eq!(ask(&folder.join("none"), LIMIT), Read::Absent);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn another_vendors_function_is_not_asked() {
        let folder = std::env::temp_dir().join(format!("pushgate-firmware-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("vendor"), "0x8086\n").unwrap();
        assert_eq!(write_ordering(&folder, "0000:00:00.0"), Read::Absent);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
