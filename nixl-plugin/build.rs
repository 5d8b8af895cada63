//! Compiles the shim: NIXL's classes cross its border, so it is C++20, over the standard library that NIXL is linked with: GNU's.

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// The C++ compiler of the shim. Packages for old hosts are linked by a compiler whose own standard library is another one.
const CXX: &str = "_PUSHGATE_NIXL_CXX";

fn main() {
    println!("cargo:rerun-if-changed=shim");
    println!("cargo:rerun-if-env-changed={CXX}");
    let mut shim = cc::Build::new();
    shim.cpp(true)
        .std("c++20")
        .file("shim/plugin.cpp")
        .include("shim")
        .flag_if_supported("-fvisibility=hidden")
        // g++ 11 and later call a function that libstdc++ has since GCC 11 alone; NIXL's wheels do with an older one.
        .define("__throw_bad_array_new_length", "__throw_bad_alloc")
        .warnings(true)
        .extra_warnings(true);
    if let Ok(compiler) = env::var(CXX) {
        shim.compiler(&compiler).cpp_link_stdlib(None);
        println!("cargo:rustc-link-arg={}", library(&compiler).display());
    }
    shim.compile("pushgate_nixl_shim");
    // Threads of ours may end after NIXL has closed the plugin.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}

/// The compiler's libstdc++, which linkers of other compilers do not find by its name.
fn library(compiler: &str) -> PathBuf {
    let said = Command::new(compiler).arg("-print-file-name=libstdc++.so.6").output();
    let said = said.unwrap_or_else(|e| panic!("{CXX}={compiler}: {e}"));
    let path = PathBuf::from(String::from_utf8_lossy(&said.stdout).trim());
    assert!(path.is_absolute(), "{compiler} has no libstdc++.so.6");
    path
}
