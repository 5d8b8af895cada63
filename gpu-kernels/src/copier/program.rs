//! The program that a client starts to have a copier ([`super::Program`]).

use std::ffi::{OsString, c_int, c_long, c_uint};
use std::io::Write as _;
use std::process::exit;

use rustix::stdio::dup2_stdout;

use super::serve::{ServeOptions, serve};
use super::start::READY;

// std links the C library anyway; rustix has none of these.
unsafe extern "C" {
    fn fork() -> c_int;
    fn close(descriptor: c_int) -> c_int;
    fn signal(number: c_int, handler: usize) -> usize;
    fn syscall(number: c_long, ...) -> c_long;
}

/// The number of `close_range`, the same on every architecture. The C library's own function of that name came with glibc 2.34: a
/// plugin that named it would not load under an earlier one.
const CLOSE_RANGE: c_long = 436;

/// `SIGPIPE`, and the handler that ignores a signal.
const SIGPIPE: c_int = 13;
const SIG_IGN: usize = 1;

/// Runs a copier in the background: serves the GPU that the arguments `--gpu GPU --cpus CORES` name, and tells by standard output that
/// it does, or why not. The calling process must have one thread; it ends at once, and a child of it serves.
pub fn background(arguments: impl Iterator<Item = OsString>) -> ! {
    close_descriptors();
    // A client that has gone is seen by an error.
    // SAFETY: installs no function.
    unsafe { signal(SIGPIPE, SIG_IGN) };
    // SAFETY: one thread; the child goes on as the parent would.
    match unsafe { fork() } {
        0 => {}
        -1 => {
            println!("fork: {}", std::io::Error::last_os_error());
            exit(1);
        }
        _ => exit(0),
    }
    // A signal for the client's terminal or process group is not for the copier, which ends when its last client has gone.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"pushgate-copier");
    let done =
        options(arguments).and_then(|options| serve(&options, &mut |who| say(&format!("{READY}{who}"))));
    if let Err(why) = done {
        say(&why);
        exit(1);
    }
    exit(0)
}

/// Closes what the client had open, which its program did not mean for a copier.
fn close_descriptors() {
    // SAFETY: this program has opened none of them.
    if unsafe { syscall(CLOSE_RANGE, 3 as c_uint, c_uint::MAX, 0 as c_uint) } == 0 {
        return;
    }
    // Linux before 5.9.
    // SAFETY: as above.
    unsafe { close_each(3) };
}

/// Closes every descriptor from `least` on, one after the other.
///
/// # Safety
/// Nothing in this process owns one of them.
unsafe fn close_each(least: c_int) {
    // The folder's own descriptor is among them, and closed by then.
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let open: Vec<c_int> = open.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for descriptor in open.into_iter().filter(|descriptor| *descriptor >= least) {
        // SAFETY: the caller's promise.
        unsafe { close(descriptor) };
    }
}

fn options(arguments: impl Iterator<Item = OsString>) -> Result<ServeOptions, String> {
    let mut options = ServeOptions { gpu: String::new(), cpus: Default::default(), stay: false };
    let mut arguments = arguments.map(|argument| argument.to_string_lossy().into_owned());
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} has no value"))?;
        match name.as_str() {
            "--gpu" => options.gpu = value,
            "--cpus" => options.cpus = value.parse().map_err(|e| format!("--cpus {value}: {e}"))?,
            _ => return Err(format!("unknown argument {name}; known: --gpu, --cpus")),
        }
    }
    Ok(options)
}

/// Writes the one sentence to standard output, and gives the output back: the client reads to its end.
fn say(text: &str) {
    // After the first sentence this is /dev/null.
    let _ = writeln!(std::io::stdout(), "{text}");
    if let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
        let _ = dup2_stdout(null);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd as _;

    use super::*;

    #[test]
    fn descriptors_closed_one_after_the_other_are_gone_and_lower_ones_stay() {
        const LEAST: c_int = 900;
        let file = std::fs::File::open("/dev/null").unwrap();
        let is_open =
            |descriptor: c_int| std::path::Path::new(&format!("/proc/self/fd/{descriptor}")).is_symlink();
        let many = [0, 1].map(|_| rustix::io::fcntl_dupfd_cloexec(&file, LEAST).unwrap().into_raw_fd());
        assert!(many.iter().all(|descriptor| *descriptor >= LEAST && is_open(*descriptor)));
        // SAFETY: the two have no owner, and no other test opens as many.
        unsafe { close_each(LEAST) };
        assert!(!many.into_iter().any(is_open));
        file.metadata().unwrap();
    }
}
