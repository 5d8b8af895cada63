//! QEMU's command line: the machine that boots a guest, and what the guest sees of its host.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::process;

/// What boots a guest.
pub struct Machine {
    /// The command that starts QEMU.
    pub qemu: Vec<OsString>,
    /// Where QEMU's own modules are, if not where it was built for.
    pub modules: Option<PathBuf>,
    /// The kernel.
    pub image: PathBuf,
    /// The folder that the guest sees, read-only, as its root.
    pub root: PathBuf,
}

impl Machine {
    /// The command that starts guest `number` with `memory` MiB. `run` is the folder of the run and holds the `initrd`; the
    /// guest's own folders are made there.
    pub fn command(&self, number: u8, memory: u32, run: &Path) -> Result<Command> {
        let folder = run.join(number.to_string());
        fs::create_dir_all(folder.join("out"))?;
        fs::create_dir_all(run.join("both"))?;
        let mut command = process::command(&self.qemu[0], run);
        command.args(&self.qemu[1..]);
        if let Some(modules) = &self.modules {
            command.env("QEMU_MODULE_DIR", modules);
        }
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        // The accelerator is named, because a KVM that is there may be one under which no stock kernel
        // boots.
        // Emulation repeats `rep movsb` byte by byte, and calls a function for each AVX instruction. Without these features
        // kernel and libc copy eight or sixteen bytes by an instruction, and the suites take two thirds of the time.
        command.args([
            "-M",
            "q35",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max,-erms,-fsrm,-avx,-avx2",
            "-smp",
            "2",
        ]);
        command.arg("-m").arg(memory.to_string());
        command.arg("-kernel").arg(&self.image).arg("-initrd").arg(run.join("initrd"));
        // An oops ends the machine, so that no test passes over one. no_timer_check: a busy host
        // starves the emulated timer, and the kernel would take that for a broken board and panic.
        // tsc=reliable: without it the kernel reads the clock from an emulated timer chip, which takes 11 us and a lock of
        // QEMU's; a program that polls does little else. By the processor's counter a read takes 0.7 us, and QEMU gives
        // all emulated processors one counter.
        let words = "console=ttyS0 loglevel=5 panic=-1 oops=panic no_timer_check tsc=reliable mitigations=off rcupdate.rcu_expedited=1";
        // A host that stands still for 20 s would have the kernel report a lockup, which suites take for a fault of the module's.
        let words = format!("{words} watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=300");
        // By the word with a dot `pushgate chaos` knows that the network here is a guest's, which it may disturb.
        let words = format!("{words} pushgate.guest=disposable");
        // Variables without a dot go into the environment of the first program.
        command.arg("-append").arg(format!("{words} VM_GUEST={number}"));
        command.arg("-chardev").arg(option("file,id=console,path=", &folder.join("console.log")));
        command.args(["-serial", "chardev:console"]);
        // The job's output, apart from the kernel's messages and without a terminal in between.
        command.args(["-device", "virtio-serial-pci", "-chardev", "file,id=output,path=/dev/stdout"]);
        command.args(["-device", "virtserialport,chardev=output,name=output"]);
        let share = "multidevs=remap,security_model=none";
        let root = option(&format!("local,mount_tag=root,readonly=on,{share},path="), &self.root);
        command.arg("-virtfs").arg(root);
        let shared = option(&format!("local,mount_tag=share,{share},path="), run);
        command.arg("-virtfs").arg(shared);
        Ok(command)
    }
}

/// An option of QEMU's that ends in a path; a comma in the path is doubled.
pub fn option(start: &str, path: &Path) -> OsString {
    format!("{start}{}", path.display().to_string().replace(',', ",,")).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_in_a_path_is_no_end_of_an_option() {
        assert_eq!(option("file,path=", Path::new("/a,b")), "file,path=/a,,b");
    }
}
