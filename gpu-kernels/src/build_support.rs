//! Code shared by build.rs and the run-time compiler: finds a source's kernels, and nvcc.

use std::path::PathBuf;

/// The names of the kernels in a `.cu` text: from lines that start with `PUSHGATE_KERNEL(name,`,
/// and from comments `// kernels: a b c`, which list kernels that a macro makes.
pub fn kernel_names(text: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("PUSHGATE_KERNEL(") {
            names.extend(rest.split(',').next().map(|name| name.trim().to_owned()));
        } else if let Some(rest) = line.trim_start().strip_prefix("// kernels:") {
            names.extend(rest.split_whitespace().map(str::to_owned));
        }
    }
    names.retain(|name| is_identifier(name));
    names.sort();
    names.dedup();
    names
}

fn is_identifier(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Looks for nvcc in `PUSHGATE_NVCC` (empty means none), `CUDA_HOME/bin`, `/usr/local/cuda/bin` and
/// `PATH`, in this order.
pub fn find_nvcc() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("PUSHGATE_NVCC") {
        return Some(PathBuf::from(named)).filter(|path| path.is_file());
    }
    let home = std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    home.into_iter()
        .chain([PathBuf::from("/usr/local/cuda/bin")])
        .chain(std::env::split_paths(&path))
        .map(|dir| dir.join("nvcc"))
        .find(|candidate| candidate.is_file())
}
