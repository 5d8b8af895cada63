//! Finds a CUDA 13 compiler: the installed one, or else NVIDIA's wheels in a virtual environment
//! below the target folder. Also checks that every kernel compiles.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail};

use crate::paths::Paths;
use crate::process;
use crate::progress::Guard;
use crate::system::{self, Need};
use crate::venv::Venv;

/// The last CUDA that drivers of the 580 branch run; each package has its own version.
const WHEELS: [&str; 6] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-nvrtc==13.0.88",
];

/// The compute capabilities of A100, of H100, H200 and GH200, of B200 and GB200, of B300 and GB300, and of GB10.
const ARCHITECTURES: [&str; 5] = ["80", "90", "100", "103", "121"];

/// Folders that hold device code, from the repository root.
const KERNELS: [&str; 7] = [
    "gpu-kernels/kernels",
    "examples",
    "examples/c",
    "examples/cuda",
    "examples/halo",
    "examples/mpi",
    "examples/pytorch",
];
const INCLUDES: [&str; 3] = ["gpu-kernels/include", "driver-shim/include", "c-api/include"];

/// A CUDA 13 toolkit.
pub struct Toolkit {
    /// The compiler.
    pub nvcc: PathBuf,
    /// The folder with libnvrtc.so.13, if it has one.
    pub nvrtc: Option<PathBuf>,
}

impl Toolkit {
    fn at(nvcc: PathBuf) -> Toolkit {
        let home = nvcc.parent().and_then(Path::parent).map(Path::to_path_buf).unwrap_or_default();
        let folders = ["lib64", "lib"].map(|name| home.join(name));
        let nvrtc = folders.into_iter().find(|folder| folder.join("libnvrtc.so.13").exists());
        Toolkit { nvcc, nvrtc }
    }
}

/// The toolkit to use; fetches one if there is none.
pub fn toolkit(paths: &Paths, guard: Guard) -> Result<Toolkit> {
    if let Some(toolkit) = present(paths) {
        return Ok(toolkit);
    }
    if let Some(reason) = system::unmet(&[Need::Python]) {
        bail!(
            "no CUDA 13 nvcc in PUSHGATE_NVCC, CUDA_HOME, /usr/local/cuda or PATH, and fetching one {reason}"
        );
    }
    fetch(paths, guard)
}

/// The toolkit to use, if one is installed or has been fetched before.
pub fn present(paths: &Paths) -> Option<Toolkit> {
    installed().or_else(|| fetched(&venv(paths)))
}

/// Looks for nvcc in the places where the build looks too, in the same order. Toolkits of other
/// versions are skipped.
fn installed() -> Option<Toolkit> {
    let named = env::var_os("PUSHGATE_NVCC").map(PathBuf::from);
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let folders =
        home.into_iter().chain([PathBuf::from("/usr/local/cuda/bin")]).chain(env::split_paths(&path));
    let nvcc = named.into_iter().chain(folders.map(|dir| dir.join("nvcc"))).find(|nvcc| is_cuda_13(nvcc))?;
    // A link in /usr/bin does not tell where the libraries are.
    Some(Toolkit::at(fs::canonicalize(&nvcc).unwrap_or(nvcc)))
}

fn is_cuda_13(nvcc: &Path) -> bool {
    if !nvcc.is_file() {
        return false;
    }
    let output = Command::new(nvcc).arg("--version").output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("release 13."))
}

fn venv(paths: &Paths) -> Venv {
    Venv::new(paths, "cuda", &WHEELS, "CUDA 13.0's compiler (about 200 MB)")
}

fn fetched(venv: &Venv) -> Option<Toolkit> {
    if !venv.is_ready() {
        return None;
    }
    let pythons = fs::read_dir(venv.folder().join("lib")).ok()?.flatten();
    let mut places = pythons.map(|python| python.path().join("site-packages/nvidia/cu13/bin/nvcc"));
    places.find(|nvcc| nvcc.is_file()).map(Toolkit::at)
}

fn fetch(paths: &Paths, guard: Guard) -> Result<Toolkit> {
    let venv = venv(paths);
    venv.make(paths, guard)?;
    fetched(&venv).with_context(|| format!("the wheels left no nvcc in {}", venv.folder().display()))
}

/// Every .cu file, as paths from the repository root.
pub fn sources(root: &Path) -> Result<Vec<PathBuf>> {
    let mut sources = Vec::new();
    for folder in KERNELS {
        let entries = fs::read_dir(root.join(folder)).with_context(|| format!("cannot read {folder}"))?;
        for entry in entries {
            let name = entry?.file_name();
            if Path::new(&name).extension().is_some_and(|extension| extension == "cu") {
                sources.push(Path::new(folder).join(name));
            }
        }
    }
    sources.sort();
    if sources.is_empty() {
        bail!("no .cu file in {}", KERNELS.join(" or "));
    }
    Ok(sources)
}

/// Compiles every kernel for the CPU executor; warnings are errors.
pub fn compile_for_cpu(paths: &Paths, guard: Guard) -> Result<()> {
    let out = paths.scratch("kernels")?;
    let compile = |source: &PathBuf| {
        let mut command = process::command("g++", &paths.root);
        // Optimised, as the executor compiles: some warnings come from no other pass. `#pragma
        // unroll` is for nvcc.
        command.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]);
        command.args(["-c", "-x", "c++"]);
        command.args(includes()).arg(source).arg("-o").arg(object(&out, source, "o"));
        command
    };
    process::run_all(sources(&paths.root)?.iter().map(compile).collect(), 2, guard)
}

/// Compiles every kernel for the supported GPUs; warnings are errors.
pub fn compile_for_gpu(paths: &Paths, toolkit: &Toolkit, guard: Guard) -> Result<()> {
    let out = paths.scratch("kernels")?;
    let compile = |source: &PathBuf| {
        let mut command = process::command(&toolkit.nvcc, &paths.root);
        command.args(["-ccbin", "g++", "-std=c++17", "-Werror", "all-warnings", "-fatbin"]);
        for n in ARCHITECTURES {
            command.arg(format!("-gencode=arch=compute_{n},code=sm_{n}"));
        }
        command.args(includes()).arg(source).arg("-o").arg(object(&out, source, "fatbin"));
        command
    };
    process::run_all(sources(&paths.root)?.iter().map(compile).collect(), 2, guard)
}

/// The NCCL whose device API programs are compiled against.
const NCCL: [&str; 1] = ["nvidia-nccl-cu13==2.30.7"];

/// Programs on NCCL's device API, from the repository root.
const ON_NCCL: [&str; 2] = ["examples/nccl-device/moe.cu", "tests/gpu/rma.cu"];

/// Compiles the programs on NCCL's device API with NCCL's headers, which are fetched once. They run on GPU hosts alone.
pub fn compile_on_nccl(paths: &Paths, guard: Guard) -> Result<()> {
    let toolkit = toolkit(paths, guard)?;
    let venv = Venv::new(paths, "nccl", &NCCL, "NCCL 2.30.7 (about 200 MB)");
    venv.make(paths, guard)?;
    let mut pythons = fs::read_dir(venv.folder().join("lib"))?.flatten();
    let headers = pythons
        .find_map(|python| {
            Some(python.path().join("site-packages/nvidia/nccl/include")).filter(|path| path.is_dir())
        })
        .with_context(|| format!("the wheel left no headers in {}", venv.folder().display()))?;
    // Only its headers are needed, and Open MPI's compiler says where they are.
    let mpi = Command::new("mpicc").arg("--showme:incdirs").output().context("mpicc")?;
    let mpi = String::from_utf8(mpi.stdout).context("the folders that mpicc names")?;
    let out = paths.scratch("kernels")?;
    let compile = |source: &&str| {
        let mut command = process::command(&toolkit.nvcc, &paths.root);
        command.args(["-ccbin", "g++", "-std=c++17", "-Werror", "all-warnings", "-arch=sm_90", "-c"]);
        command.arg("-isystem").arg(&headers);
        for folder in mpi.split_whitespace() {
            command.args(["-isystem", folder]);
        }
        command.arg(source).arg("-o").arg(object(&out, Path::new(source), "o"));
        command
    };
    process::run_all(ON_NCCL.iter().map(compile).collect(), 2, guard)
}

pub fn includes() -> impl Iterator<Item = String> {
    INCLUDES.iter().map(|folder| format!("-I{folder}"))
}

/// The object file of a source; its name includes the folder, because two folders may hold files of
/// one name.
fn object(out: &Path, source: &Path, extension: &str) -> PathBuf {
    let folders = source.parent().into_iter().flat_map(Path::iter);
    let mut name = OsString::new();
    for part in folders {
        name.push(part);
        name.push("-");
    }
    name.push(source.file_name().unwrap_or_default());
    out.join(name).with_extension(extension)
}
