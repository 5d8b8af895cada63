//! Sets how the shared library is linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // NCCL unloads the library after its last communicator and may load it again. Code that Rust's
    // runtime has registered with the C library by then must not be unmapped.
    println!("cargo:rustc-link-arg-cdylib=-Wl,-z,nodelete");
    // The dynamic loader can run the library as the copier's program (src/program.rs).
    println!("cargo:rustc-link-arg-cdylib=-Wl,-e,_pushgate_copier_start");
    println!("cargo:rustc-link-arg-cdylib=-Wl,-soname,libnccl-net-pushgate.so");
}
