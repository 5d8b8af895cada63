//! Compiles CUDA source to a cubin for one device, by NVRTC, or by nvcc where NVRTC is absent.
//! Results are cached on disk.
#![allow(non_snake_case)] // NVRTC's own names

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use libloading::Library;
use libloading::os::unix::{Library as UnixLibrary, RTLD_GLOBAL, RTLD_NOW};

use super::driver::symbol;
use crate::build_support::find_nvcc;
use crate::cache::{Cache, Key};
use crate::compiler::{Compiler, run_compiler, source_file};
use crate::embedded::HEADERS;
use crate::error::{DeviceError, Result};
use crate::library;
use crate::source::Source;

macro_rules! nvrtc {
    ($(fn $name:ident($($type:ty),*);)*) => {
        /// The functions of NVRTC that this code calls, loaded as [`super::driver`] loads those of
        /// the driver.
        struct Nvrtc {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
            nvrtcGetErrorString: unsafe extern "C" fn(u32) -> *const c_char,
            version: (c_int, c_int),
            _library: Library,
        }

        $(const _: unsafe fn($($type),*) -> nvrtcResult = sys::$name;)*

        impl Nvrtc {
            fn resolve(library: Library) -> std::result::Result<Self, String> {
                Ok(Self {
                    $(
                        // SAFETY: nvrtc.h declares the symbol with this type (checked above against
                        // cudarc's bindings); an enum result is 32 bits in C.
                        $name: unsafe { symbol(&library, stringify!($name)) }?,
                    )*
                    // SAFETY: nvrtc.h declares the symbol so; it takes the code by value, as a
                    // number of 32 bits.
                    nvrtcGetErrorString: unsafe { symbol(&library, "nvrtcGetErrorString") }?,
                    version: (0, 0),
                    _library: library,
                })
            }
        }
    };
}

nvrtc! {
    fn nvrtcVersion(*mut c_int, *mut c_int);
    fn nvrtcCreateProgram(
        *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    );
    fn nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
    fn nvrtcDestroyProgram(*mut nvrtcProgram);
    fn nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
    fn nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
    fn nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
    fn nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
}

const SONAMES: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Folders that may hold NVRTC, in addition to those that the dynamic linker searches.
fn folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let env = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(home) = env("CUDA_HOME") {
        folders.push(home.join("lib64"));
    }
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    // Python environments that contain NVIDIA's wheels.
    let mut sites: Vec<PathBuf> = env("PUSHGATE_PYTHON_SITE").into_iter().collect();
    for root in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env) {
        let Ok(entries) = fs::read_dir(root.join("lib")) else { continue };
        let pythons =
            entries.flatten().filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"python"));
        sites.extend(pythons.map(|entry| entry.path().join("site-packages")));
    }
    for site in sites {
        folders.push(site.join("nvidia/cu13/lib"));
        folders.push(site.join("nvidia/cuda_nvrtc/lib"));
    }
    folders
}

/// The first file of `folder` whose name starts with `prefix`.
fn starting(folder: &Path, prefix: &str) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(prefix)))
        .collect();
    found.sort();
    found.into_iter().next()
}

fn load_global(path: &Path) -> std::result::Result<Library, String> {
    // SAFETY: NVIDIA's library, from a place that the user or the administrator named; its
    // constructors may run on any thread. It is loaded RTLD_GLOBAL, so that NVRTC finds the
    // built-ins that were loaded before.
    let library = unsafe { UnixLibrary::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    library.map(Library::from).map_err(|error| library::explain(&error))
}

fn open_in(folder: &Path) -> std::result::Result<Nvrtc, String> {
    let wanted =
        starting(folder, "libnvrtc.so").ok_or_else(|| format!("{} has no libnvrtc.so", folder.display()))?;
    // NVRTC opens its built-ins by name only, at the first compile. If the folder is not on the
    // linker's path, that fails unless the built-ins are loaded already.
    if let Some(builtins) = starting(folder, "libnvrtc-builtins.so") {
        std::mem::forget(load_global(&builtins)?);
    }
    Nvrtc::resolve(load_global(&wanted)?)
}

fn open() -> std::result::Result<Nvrtc, String> {
    if let Some(named) = std::env::var_os("PUSHGATE_NVRTC_DIR").filter(|named| !named.is_empty()) {
        // A user who names a folder wants the NVRTC there and no other.
        return open_in(Path::new(&named))
            .map_err(|reason| format!("PUSHGATE_NVRTC_DIR: {reason}"))
            .and_then(ask);
    }
    for soname in SONAMES {
        // SAFETY: NVIDIA's library, from the linker's search path; its constructors may run on any
        // thread.
        if let Ok(library) = unsafe { Library::new(*soname) } {
            return Nvrtc::resolve(library).and_then(ask);
        }
    }
    let folders = folders();
    match folders.iter().find_map(|folder| open_in(folder).ok()) {
        Some(nvrtc) => ask(nvrtc),
        None => {
            let places: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
            Err(format!("no libnvrtc.so on the linker's path nor in {}", places.join(", ")))
        }
    }
}

fn ask(mut nvrtc: Nvrtc) -> std::result::Result<Nvrtc, String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two ints.
    let code = unsafe { (nvrtc.nvrtcVersion)(&mut major, &mut minor) };
    if code != 0 {
        return Err(format!("nvrtcVersion failed with {}", nvrtc.explain(code)));
    }
    nvrtc.version = (major, minor);
    Ok(nvrtc)
}

fn nvrtc() -> std::result::Result<&'static Nvrtc, String> {
    static NVRTC: OnceLock<std::result::Result<Nvrtc, String>> = OnceLock::new();
    NVRTC.get_or_init(open).as_ref().map_err(String::clone)
}

/// A program of NVRTC, destroyed on drop.
struct Program<'a>(&'a Nvrtc, nvrtcProgram);

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by nvrtcCreateProgram and destroyed only here.
        unsafe { (self.0.nvrtcDestroyProgram)(&mut self.1) };
    }
}

impl Nvrtc {
    fn explain(&self, code: u32) -> String {
        // SAFETY: returns a static string for every code, including unknown ones.
        let text = unsafe { (self.nvrtcGetErrorString)(code) };
        if text.is_null() {
            return format!("code {code}");
        }
        // SAFETY: the pointer is not null, as checked above.
        let text = unsafe { CStr::from_ptr(text) };
        format!("{} ({code})", text.to_string_lossy())
    }

    fn name(&self) -> String {
        format!("NVRTC {}.{}", self.version.0, self.version.1)
    }

    fn compile(&self, source: &Source, options: &[String]) -> Result<Vec<u8>> {
        let fail = |output: String| DeviceError::Compile {
            source_name: source.name().to_owned(),
            compiler: format!("{} {}", self.name(), options.join(" ")),
            output,
        };
        let c_string = |text: &str| {
            CString::new(text)
                .map_err(|error| fail(format!("a NUL byte at {} of the text", error.nul_position())))
        };
        let text = c_string(source.body())?;
        let name = c_string(source.name())?;
        let mut headers = Vec::new();
        for (name, text) in HEADERS {
            headers.push((c_string(name)?, c_string(text)?));
        }
        let header_names: Vec<*const c_char> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
        let header_texts: Vec<*const c_char> = headers.iter().map(|(_, text)| text.as_ptr()).collect();
        let options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>>>()?;
        let option_pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();

        let mut program = Program(self, null_mut());
        // SAFETY: C strings that outlive the call, and two arrays of the given length.
        let code = unsafe {
            (self.nvrtcCreateProgram)(
                &mut program.1,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                header_texts.as_ptr(),
                header_names.as_ptr(),
            )
        };
        if code != 0 {
            // No program was made, so there is none to destroy.
            std::mem::forget(program);
            return Err(fail(format!("nvrtcCreateProgram failed with {}", self.explain(code))));
        }
        // SAFETY: the program is valid; the C strings' array has the given length.
        let code = unsafe {
            (self.nvrtcCompileProgram)(program.1, option_pointers.len() as c_int, option_pointers.as_ptr())
        };
        if code != 0 {
            return Err(fail(format!(
                "nvrtcCompileProgram failed with {}\n{}",
                self.explain(code),
                self.log(&program)
            )));
        }
        let mut size = 0;
        // SAFETY: the program is compiled; writes one size.
        let code = unsafe { (self.nvrtcGetCUBINSize)(program.1, &mut size) };
        if code != 0 || size == 0 {
            return Err(fail(format!("nvrtcGetCUBINSize gave {size} bytes, {}", self.explain(code))));
        }
        let mut cubin = vec![0u8; size];
        // SAFETY: writes as many bytes as nvrtcGetCUBINSize reported.
        let code = unsafe { (self.nvrtcGetCUBIN)(program.1, cubin.as_mut_ptr().cast()) };
        if code != 0 {
            return Err(fail(format!("nvrtcGetCUBIN failed with {}", self.explain(code))));
        }
        Ok(cubin)
    }

    fn log(&self, program: &Program<'_>) -> String {
        let mut size = 0;
        // SAFETY: the program is valid; writes one size.
        if unsafe { (self.nvrtcGetProgramLogSize)(program.1, &mut size) } != 0 || size == 0 {
            return "(no log)".to_owned();
        }
        let mut log = vec![0u8; size];
        // SAFETY: writes as many bytes as nvrtcGetProgramLogSize reported.
        if unsafe { (self.nvrtcGetProgramLog)(program.1, log.as_mut_ptr().cast()) } != 0 {
            return "(no log)".to_owned();
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }
}

/// Compiles `source` for `sm_<arch>` (90, say), or takes the cubin from the cache.
pub(super) fn cubin(source: &Source, arch: u32, cache: &Cache) -> Result<Vec<u8>> {
    let nvrtc_reason = match nvrtc() {
        Ok(nvrtc) => return by_nvrtc(nvrtc, source, arch, cache),
        Err(reason) => reason,
    };
    let none = |nvcc: &str| DeviceError::NoGpuCompiler { nvrtc: nvrtc_reason.clone(), nvcc: nvcc.to_owned() };
    let nvcc =
        find_nvcc().ok_or_else(|| none("not found in PUSHGATE_NVCC, CUDA_HOME, /usr/local/cuda nor PATH"))?;
    let compiler = Compiler::new(vec![nvcc.clone().into()])
        .ok_or_else(|| none(&format!("{} does not run", nvcc.display())))?;
    by_nvcc(&compiler, source, arch, cache)
}

fn by_nvrtc(nvrtc: &Nvrtc, source: &Source, arch: u32, cache: &Cache) -> Result<Vec<u8>> {
    let mut options = vec![
        format!("--gpu-architecture=sm_{arch}"),
        "--std=c++17".to_owned(),
        "--generate-line-info".to_owned(),
    ];
    if let Some(dir) = source.dir() {
        options.push(format!("--include-path={}", dir.display()));
    }
    let mut key = Key::new("nvrtc");
    key.add(nvrtc.name().as_bytes());
    for option in &options {
        key.add(option.as_bytes());
    }
    source.add_to(&mut key);
    let path = cache.get(&key, "cubin", |out| {
        let cubin = nvrtc.compile(source, &options)?;
        fs::write(out, cubin).map_err(|e| io("write a compiled module", out, e))
    })?;
    fs::read(&path).map_err(|e| io("read a compiled module", &path, e))
}

fn by_nvcc(nvcc: &Compiler, source: &Source, arch: u32, cache: &Cache) -> Result<Vec<u8>> {
    let mut key = Key::new("nvcc");
    nvcc.add_to(&mut key);
    key.add(&arch.to_le_bytes());
    source.add_to(&mut key);
    let path = cache.get(&key, "cubin", |out| {
        let headers = cache.headers()?;
        let file = source_file(cache, source)?;
        let mut command: Command = nvcc.command();
        command.args(["-cubin", "-std=c++17", "-O3", "-lineinfo"]).arg(format!("-arch=sm_{arch}"));
        command.arg("-I").arg(headers);
        if let Some(dir) = source.dir() {
            command.arg("-I").arg(dir);
        }
        command.args(["-x", "cu"]).arg(file.path()).arg("-o").arg(out);
        run_compiler(source, command)
    })?;
    fs::read(&path).map_err(|e| io("read a compiled module", &path, e))
}

fn io(what: &'static str, path: &Path, source: std::io::Error) -> DeviceError {
    DeviceError::Io { what, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::tests::Folder;
    use crate::embedded::{FATBINS, SOURCES};

    fn is_elf(cubin: &[u8]) -> bool {
        cubin.starts_with(b"\x7fELF")
    }

    /// Needs no GPU, only the NVRTC library.
    #[test]
    fn nvrtc_compiles_every_kernel_and_caches_it() {
        if std::env::var_os("PUSHGATE_NVRTC_DIR").is_none() {
            return pushgate_tests::skip(
                "nvrtc_compiles_every_kernel_and_caches_it: set PUSHGATE_NVRTC_DIR to the folder of libnvrtc.so",
            );
        }
        let folder = Folder::new("nvrtc");
        let cache = Cache::at(folder.0.clone()).unwrap();
        for (name, text) in SOURCES {
            let source = Source::text(*name, *text);
            assert!(is_elf(&cubin(&source, 90, &cache).unwrap()), "{name}");
        }
        let files = || fs::read_dir(&folder.0).unwrap().count();
        let before = files();
        assert_eq!(before, SOURCES.len());
        assert!(is_elf(&cubin(&Source::text(SOURCES[0].0, SOURCES[0].1), 90, &cache).unwrap()));
        assert_eq!(files(), before);

        let gate = Source::text("gate.cu", crate::cpu::tests::GATE);
        assert!(is_elf(&cubin(&gate, 90, &cache).unwrap()));

        let wrong = Source::text("wrong.cu", "#include \"pushgate/arch.cuh\"\nint wrong = nonsense;\n");
        let error = cubin(&wrong, 90, &cache).unwrap_err().to_string();
        assert!(error.contains("wrong.cu(2)") && error.contains("nonsense"), "{error}");

        let user = Folder::new("nvrtc-user");
        fs::write(user.0.join("own.h"), "#define OWN 7\n").unwrap();
        let text = "#include \"pushgate/arch.cuh\"\n#include \"own.h\"\nstruct P { pushgate::u64 *to; };\nPUSHGATE_KERNEL(own, P) { *p.to = OWN; }\n";
        fs::write(user.0.join("own.cu"), text).unwrap();
        let own = Source::path(user.0.join("own.cu")).unwrap();
        assert!(is_elf(&cubin(&own, 90, &cache).unwrap()));
    }

    #[test]
    fn nvcc_compiles_a_source_at_run_time() {
        // Where the build would find no nvcc: the one of the toolkit whose NVRTC is tested above.
        let beside_nvrtc = || {
            let libraries = PathBuf::from(std::env::var_os("PUSHGATE_NVRTC_DIR")?);
            Some(libraries.parent()?.join("bin/nvcc")).filter(|nvcc| nvcc.is_file())
        };
        let Some(nvcc) = find_nvcc().or_else(beside_nvrtc) else {
            return pushgate_tests::skip("nvcc_compiles_a_source_at_run_time: set PUSHGATE_NVCC to nvcc");
        };
        let folder = Folder::new("nvcc");
        let cache = Cache::at(folder.0.clone()).unwrap();
        let compiler = Compiler::new(vec![nvcc.into()]).unwrap();
        let source = Source::text(SOURCES[0].0, SOURCES[0].1);
        assert!(is_elf(&by_nvcc(&compiler, &source, 90, &cache).unwrap()));
        let wrong = Source::text("wrong.cu", "int fine;\nint wrong = nonsense;\n");
        let error = by_nvcc(&compiler, &wrong, 90, &cache).unwrap_err().to_string();
        assert!(error.contains("wrong.cu(2)"), "{error}");
    }

    #[test]
    fn fatbins_are_whole_or_absent() {
        // A build without nvcc has no fatbins; fatbins of only some sources would be wrong.
        let names: Vec<&str> = FATBINS.iter().map(|(name, _)| *name).collect();
        assert!(names.is_empty() || names == SOURCES.iter().map(|(name, _)| *name).collect::<Vec<_>>());
        // The magic number of a fatbin.
        assert!(FATBINS.iter().all(|(_, image)| image.starts_with(&0xba55ed50u32.to_le_bytes())));
    }
}
