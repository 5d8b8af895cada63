//! Where tests find the programs that they start and the sources that they read: in the checkout that
//! built them, or in a bundle (`cargo xtask gpu --bundle`) on a host without a toolchain.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The folder of the bundle that this test belongs to. The bundle's script `run-tests` names the folder.
fn bundle() -> Option<&'static Path> {
    static BUNDLE: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUNDLE.get_or_init(|| std::env::var_os("_PUSHGATE_TEST_BUNDLE").map(PathBuf::from)).as_deref()
}

/// The folder that holds the repository's sources, as far as tests read them.
pub fn root() -> PathBuf {
    match bundle() {
        Some(folder) => folder.join("source"),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace's root").to_path_buf(),
    }
}

/// A folder for temporary files that may hold programs. `cargo` is the caller's
/// `env!("CARGO_TARGET_TMPDIR")`, which cargo sets for integration tests alone.
pub fn scratch(cargo: &str) -> PathBuf {
    if bundle().is_some() { std::env::temp_dir() } else { cargo.into() }
}

/// The command `pushgate`, built with the calling test's profile: no test's package builds it.
pub fn pushgate() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| match bundle() {
        Some(folder) => folder.join("pushgate"),
        None => build(&["--package", "pushgate-cli"]).join("pushgate"),
    })
}

/// The program of an example, built with the calling test's profile: a test alone (`--test NAME`) builds no
/// example, and must not try one of earlier sources.
pub fn example(name: &str) -> PathBuf {
    if let Some(folder) = bundle() {
        return folder.join(name);
    }
    static BUILT: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if !built.contains(name) {
        build(&["--example", name]);
        built.insert(name.into());
    }
    profile().join("examples").join(name)
}

/// The archive of the C API, built with the calling test's profile; nothing in a bundle, which has no compiler beside it.
pub fn c_library() -> Option<PathBuf> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let built = || build(&["--package", "pushgate-c", "--package", "pushgate-cli"]).join("libpushgate_c.a");
    bundle().is_none().then(|| BUILT.get_or_init(built).clone())
}

/// The NCCL plugin: the file that `NCCL_CALLER_PLUGIN` names, or else the bundle's, or else the one that
/// cargo built for the calling test.
///
/// # Panics
///
/// If there is none.
pub fn plugin() -> PathBuf {
    if let Some(path) = std::env::var_os("NCCL_CALLER_PLUGIN") {
        return path.into();
    }
    let path = match bundle() {
        Some(folder) => folder.join("libnccl-net-pushgate.so"),
        None => this().with_file_name("libnccl_net_pushgate.so"),
    };
    assert!(
        path.is_file(),
        "no {}: build the plugin with `cargo xtask plugin` and name the file by NCCL_CALLER_PLUGIN",
        path.display()
    );
    path
}

/// The program `nccl-caller`. `cargo` is the caller's `env!("CARGO_BIN_EXE_nccl-caller")`.
pub fn nccl_caller(cargo: &str) -> PathBuf {
    bundle().map_or_else(|| cargo.into(), |folder| folder.join("nccl-caller"))
}

fn this() -> PathBuf {
    std::env::current_exe().expect("our own path")
}

/// Cargo's folder of the profile that the calling test was built with.
fn profile() -> PathBuf {
    this().parent().and_then(Path::parent).expect("…/PROFILE/deps/this").to_path_buf()
}

/// Takes what the outer cargo says about the test's package out of the environment of a command that runs cargo. The build script of
/// `ring` asks to be run again when these variables change, and `ring` and all above it would be compiled anew.
pub fn forget_package(command: &mut Command) {
    let of_a_package = |name: &str| name.starts_with("CARGO_MANIFEST_") || name.starts_with("CARGO_PKG_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_a_package)) {
        command.env_remove(name);
    }
}

/// Has cargo build; returns the folder of the profile. The command is among the packages each time: dependencies have the features then that
/// they have in the build of the tests, and are not compiled again.
fn build(arguments: &[&str]) -> PathBuf {
    let profile = profile();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(root()).arg("build").args(arguments);
    cargo.arg("--target-dir").arg(profile.parent().expect("…/PROFILE"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    forget_package(&mut cargo);
    let built = cargo.output().unwrap_or_else(|error| {
        panic!("{} does not start ({error}); in a bundle, run the script run-tests", env!("CARGO"))
    });
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    profile
}
