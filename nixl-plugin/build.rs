//! Compiles the shim: NIXL's classes cross its border, so it is C++20.

fn main() {
    println!("cargo:rerun-if-changed=shim");
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .file("shim/plugin.cpp")
        .include("shim")
        .flag_if_supported("-fvisibility=hidden")
        .warnings(true)
        .extra_warnings(true)
        .compile("pushgate_nixl_shim");
    // Threads of ours may end after NIXL has closed the plugin.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
