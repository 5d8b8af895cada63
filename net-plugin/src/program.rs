//! The copier's program: this library, run by the dynamic loader. So a plugin and its copier are always of one build.
//!
//! The library's ELF header names [`_pushgate_copier_start`] as its entry (build.rs), which does not concern a process that loads the
//! library with dlopen. The loader, given the library as its program, maps it, runs the constructors of the libraries that it needs, and
//! jumps there. It leaves the constructors of the program itself to the C library's start of a program, which this library does not have:
//! the one that this library has, Rust's, keeps the arguments, which are read from the stack in its place.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pushgate::copier::{Program, background};
use pushgate_driver_shim::file::read_text;

// The entry: the number of arguments and the arguments lie on the stack, and there is no return address.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text._pushgate_copier_start,\"ax\",@progbits",
    ".globl _pushgate_copier_start",
    ".type _pushgate_copier_start,@function",
    "_pushgate_copier_start:",
    "mov rdi, rsp",
    "xor ebp, ebp",
    "and rsp, -16",
    "call {main}",
    "ud2",
    ".popsection",
    main = sym main,
);
#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".pushsection .text._pushgate_copier_start,\"ax\",@progbits",
    ".globl _pushgate_copier_start",
    ".type _pushgate_copier_start,@function",
    "_pushgate_copier_start:",
    "mov x0, sp",
    "mov x29, #0",
    "mov x30, #0",
    "bl {main}",
    "brk #1",
    ".popsection",
    main = sym main,
);

/// What the entry calls, with the address of the number of arguments, which the addresses of the arguments follow.
///
/// # Safety
/// The stack is as the loader leaves it.
unsafe extern "C" fn main(stack: *const usize) -> ! {
    // SAFETY: the caller's promise: as many C strings follow as the number says, the program's name first.
    let argument = |n: usize| unsafe { CStr::from_ptr(*stack.add(1 + n) as *const c_char) };
    // SAFETY: the caller's promise.
    let count = unsafe { *stack };
    background((1..count).map(|n| OsStr::from_bytes(argument(n).to_bytes()).to_owned()))
}

/// How the copier's program is started.
pub fn program() -> Result<Program, String> {
    let maps = read_text("/proc/self/maps").map_err(|e| format!("/proc/self/maps: {e}"))?;
    let here = main as unsafe extern "C" fn(*const usize) -> ! as usize as u64;
    let library =
        mapped(&maps, |range, _| range.contains(&here)).ok_or("this library is not in /proc/self/maps")?;
    let is_loader =
        |name: &str| name.starts_with("ld-") || name.starts_with("ld.so") || name.starts_with("ld64.so");
    let loader = mapped(&maps, |_, path| path.rsplit('/').next().is_some_and(is_loader))
        .ok_or("no dynamic loader (ld-linux) is in /proc/self/maps")?;
    if let Some(gone) = [library, loader].into_iter().find(|path| path.ends_with(" (deleted)")) {
        return Err(format!(
            "{gone}: the file was removed or replaced after it was loaded; start the program anew"
        ));
    }
    let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    if program == Path::new(library) {
        return Err(format!("{library} is a program with the plugin linked in, and no shared library"));
    }
    Ok(Program { path: loader.into(), args: vec![library.into()] })
}

/// The file of the first mapping that `wanted` accepts by its addresses and its path.
fn mapped(maps: &str, wanted: impl Fn(std::ops::Range<u64>, &str) -> bool) -> Option<&str> {
    maps.lines().find_map(|line| {
        // Addresses, rights, offset, device, inode, path; a path may have spaces.
        let path = &line[line.find('/')?..];
        let (first, last) = line.split_whitespace().next()?.split_once('-')?;
        let address = |text| u64::from_str_radix(text, 16).ok();
        wanted(address(first)?..address(last)?, path).then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_an_address_is_found_among_the_mappings() {
        let maps = "\
00400000-00401000 r--p 00000000 fe:00 12   /usr/bin/python3
7f0000000000-7f0000001000 rw-p 00000000 00:00 0
7f0000001000-7f0000009000 r-xp 00001000 fe:00 77   /opt/a b/libnccl-net-pushgate.so
7f0000009000-7f000000a000 r-xp 00000000 fe:00 78   /usr/lib/ld-linux-x86-64.so.2
7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0   [stack]";
        let at = |address| mapped(maps, |range, _| range.contains(&address));
        assert_eq!(at(0x7f00_0000_1fff), Some("/opt/a b/libnccl-net-pushgate.so"));
        assert_eq!([at(0x7f00_0000_0000), at(1)], [None; 2]);
        assert_eq!(mapped(maps, |_, path| path.contains("/ld-")), Some("/usr/lib/ld-linux-x86-64.so.2"));
        let error = program().unwrap_err();
        assert!(error.contains("no shared library"), "{error}");
    }
}
