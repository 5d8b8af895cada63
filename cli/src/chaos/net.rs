//! Faults of network devices: a port that goes down and comes up again, packets that are lost or late.
//!
//! **The rule.** Such a fault must never touch the network of a host. So a device is taken only in a network namespace that
//! somebody made for the purpose: it is not that of process 1, and the device is a virtual one (a host's own card is none).
//! Or in a virtual machine of `cargo xtask vm`, which its kernel's command line tells ([`GUEST`]). What a fault changed is put
//! right when the fault ends, and at the end of the run, however that comes about; only after SIGKILL nothing is.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use pushgate::Error;
use serde_json::Value;

/// The word of the kernel's command line by which `cargo xtask vm` marks its guests.
const GUEST: &str = "pushgate.guest=disposable";

/// How packets over a device suffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Netem {
    /// Packets that are lost, of 100.
    pub loss: u32,
    pub delay: Duration,
}

/// The network devices that faults disturb, one fault at a time.
#[derive(Debug)]
pub struct Links {
    names: Vec<String>,
    /// The command that puts right what was changed.
    undo: Option<String>,
}

impl Links {
    /// Takes the devices of a list with commas, if faults may be made of them here.
    pub fn new(list: &str) -> Result<Self> {
        let names: Vec<String> = list.split(',').map(String::from).collect();
        let plain = |name: &String| {
            let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            !name.is_empty() && !name.starts_with('-') && name.chars().all(fits)
        };
        if !names.iter().all(plain) {
            return Err(Error::flag("link", list, "names of network devices with commas between them").into());
        }
        let refused = |why: &str| {
            let allowed = format!(
                "virtual devices of a network namespace made for this, or of a guest of `cargo xtask vm`: {why}"
            );
            anyhow::Error::from(Error::flag("link", list, allowed))
        };
        let guest = is_guest(&fs::read_to_string("/proc/cmdline").unwrap_or_default());
        if !guest {
            let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net"));
            match (namespace("thread-self"), namespace("1")) {
                (Ok(own), Ok(first)) if own != first => {}
                (Ok(_), Ok(_)) => return Err(refused("this is the network namespace of process 1")),
                (Err(e), _) | (_, Err(e)) => {
                    return Err(refused(&format!("which network namespace this is can't be told ({e})")));
                }
            }
        }
        for name in &names {
            let said = run(&format!("ip -json -details link show dev {name}"))?;
            if !guest && !is_virtual(&said) {
                return Err(refused(&format!("{name} is no virtual device")));
            }
        }
        Ok(Links { names, undo: None })
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Sets a device down.
    pub fn down(&mut self, link: usize) -> Result<()> {
        let name = &self.names[link];
        self.change(format!("ip link set dev {name} down"), format!("ip link set dev {name} up"))
    }

    /// Has the packets that leave over a device suffer. Fails where the device has a queueing discipline already.
    pub fn disturb(&mut self, link: usize, Netem { loss, delay }: Netem) -> Result<()> {
        let name = &self.names[link];
        let delay = delay.as_micros();
        let make = format!("tc qdisc add dev {name} root netem loss {loss}% delay {delay}us");
        self.change(make, format!("tc qdisc delete dev {name} root"))
    }

    fn change(&mut self, make: String, undo: String) -> Result<()> {
        self.restore()?;
        run(&make)?;
        self.undo = Some(undo);
        Ok(())
    }

    /// Puts right what was changed.
    pub fn restore(&mut self) -> Result<()> {
        self.undo.take().map_or(Ok(()), |undo| run(&undo).map(drop))
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        if let Err(e) = self.restore() {
            super::say(format_args!("{e:#}"));
        }
    }
}

/// Whether the kernel's command line is that of a guest.
fn is_guest(cmdline: &str) -> bool {
    cmdline.split_whitespace().any(|word| word == GUEST)
}

/// Whether what `ip -json -details` says of a device is that of a virtual one: those have a kind.
fn is_virtual(said: &str) -> bool {
    let said: Value = serde_json::from_str(said).unwrap_or_default();
    said[0]["linkinfo"]["info_kind"].is_string()
}

/// Runs a command of iproute2, and returns what it says.
fn run(command: &str) -> Result<String> {
    let mut words = command.split(' ');
    let program = words.next().expect("a command has a word");
    let output = Command::new(program).args(words).output().with_context(|| format!("starting {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command}: {}", said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_known_by_its_kernels_whole_word_alone() {
        assert!(is_guest("console=ttyS0 pushgate.guest=disposable VM_GUEST=1\n"));
        for other in
            ["", "console=ttyS0 quiet", "pushgate.guest=", "xpushgate.guest=disposable", "VM_GUEST=1"]
        {
            assert!(!is_guest(other), "{other}");
        }
    }

    #[test]
    fn a_device_without_a_kind_is_not_taken_for_a_virtual_one() {
        assert!(is_virtual(r#"[{"ifname":"r0","linkinfo":{"info_kind":"dummy"}}]"#));
        for card in ["", "[]", r#"[{"ifname":"eth0"}]"#, r#"[{"ifname":"eth0","linkinfo":{}}]"#] {
            assert!(!is_virtual(card), "{card}");
        }
    }

    #[test]
    fn a_network_namespace_that_is_that_of_process_1_or_may_be_is_refused() {
        // No device called `lo` is virtual, so this is refused whatever the namespace is.
        let said = format!("{:#}", Links::new("lo").unwrap_err());
        assert!(said.contains("of a network namespace made for this"), "{said}");
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
        let why = match (namespace("thread-self"), namespace("1")) {
            (Some(own), Some(first)) if own == first => "this is the network namespace of process 1",
            (Some(_), Some(_)) => "lo is no virtual device",
            _ => "which network namespace this is can't be told",
        };
        assert!(said.contains(why), "{said}");
    }

    #[test]
    fn names_that_are_no_names_of_devices_are_refused() {
        for list in ["", "a,", "a b", "-a", "a;b", "a/b"] {
            let e = Links::new(list).unwrap_err().to_string();
            assert!(e.contains("names of network devices"), "{list}: {e}");
        }
    }
}
