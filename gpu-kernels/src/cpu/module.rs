//! A module on the CPU: kernels in this program, or in a library that was compiled from a user's
//! source.

use std::any::Any;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libloading::Library;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::embedded::{self, CPU_KERNELS, CpuEntry};
use crate::error::{DeviceError, Result, list};
use crate::executor::LoadedModule;
use crate::image::Image;
use crate::library;
use crate::source::Source;

/// Where a module's kernels are.
enum Kernels {
    /// In this program.
    Embedded,
    /// In a library. The names are those in the source's text, for messages.
    Library(Library, Vec<String>),
}

/// A module that the CPU executor has loaded.
pub(super) struct CpuModule {
    name: String,
    kernels: Kernels,
}

impl CpuModule {
    /// The project's own kernels.
    pub(super) fn embedded() -> Self {
        Self { name: "embedded".to_owned(), kernels: Kernels::Embedded }
    }

    /// Loads the library at `path`, compiled from `source`.
    pub(super) fn open(path: &Path, source: &Source) -> Result<Self> {
        let kernels = Kernels::Library(open(path)?, source.kernels());
        Ok(Self { name: source.name().to_owned(), kernels })
    }

    /// Loads the library that an image is. The linker reads it from memory of this process: the image's file may change.
    pub(super) fn load(image: &Image) -> Result<Self> {
        let failed = |reason: String| DeviceError::Load { module: image.name().to_owned(), reason };
        let memory = memfd_create("pushgate-image", MemfdFlags::CLOEXEC);
        let mut file = File::from(memory.map_err(|e| failed(e.to_string()))?);
        file.write_all(image.contents()).map_err(|e| failed(e.to_string()))?;
        let path = format!("/proc/self/fd/{}{}", unlike_others(), file.as_raw_fd());
        // SAFETY: the program asks to run the image's kernels, so its constructors may do what its kernels may do. dlopen uses
        // RTLD_LOCAL here, so its symbols replace none of ours.
        let library = unsafe { Library::new(path) }.map_err(|e| failed(library::explain(&e)))?;
        let kernels = Kernels::Library(library, image.kernels().to_vec());
        Ok(Self { name: image.name().to_owned(), kernels })
    }

    fn unknown(&self, kernel: &str) -> DeviceError {
        DeviceError::UnknownKernel {
            kernel: kernel.to_owned(),
            module: self.name.clone(),
            known: list(&self.kernels()),
        }
    }

    /// Finds a kernel's entry point and the size of its parameters.
    pub(super) fn find(&self, kernel: &str) -> Result<(CpuEntry, u32)> {
        match &self.kernels {
            Kernels::Embedded => CPU_KERNELS
                .iter()
                .find(|known| known.name == kernel)
                .map(|known| (known.entry, (known.params_size)()))
                .ok_or_else(|| self.unknown(kernel)),
            Kernels::Library(library, _) => {
                let size_name = format!("{kernel}_params_size");
                // SAFETY: a symbol NAME with a NAME_params_size beside it comes from
                // PUSHGATE_KERNEL, which gives the two symbols exactly these types; a source that
                // fakes the pair is responsible for the result. The pointers are used only while
                // the module is alive: a launch holds a reference to it.
                let found = unsafe {
                    let size = library.get::<extern "C" fn() -> u32>(size_name.as_bytes());
                    let entry = library.get::<CpuEntry>(kernel.as_bytes());
                    size.and_then(|size| Ok((*entry?, *size)))
                };
                let (entry, size) = found.map_err(|_| self.unknown(kernel))?;
                Ok((entry, size()))
            }
        }
    }
}

impl LoadedModule for CpuModule {
    fn name(&self) -> &str {
        &self.name
    }

    fn kernels(&self) -> Vec<String> {
        match &self.kernels {
            Kernels::Embedded => embedded::kernel_names(),
            Kernels::Library(_, names) => names.clone(),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A part of a path that changes nothing, and that no other call of this process returns.
///
/// The linker takes a path that it knows for the library that it has opened there, which may still be open when its descriptor has
/// become another file's.
fn unlike_others() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: the number orders nothing.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // Each binary digit is a step to the folder itself.
    format!("{number:b}").chars().map(|digit| if digit == '1' { "./" } else { "/" }).collect()
}

fn open(path: &Path) -> Result<Library> {
    // SAFETY: the file lies in a folder that only this user can write, and was made from a source
    // whose kernels this user asked to run, so its constructors may do what its kernels may do.
    // dlopen uses RTLD_LOCAL here, so the file's symbols replace none of ours.
    unsafe { Library::new(path) }.map_err(|error| DeviceError::Load {
        module: path.display().to_string(),
        reason: library::explain(&error),
    })
}

/// The module as this executor's own; an error for a module of another executor.
pub(super) fn cpu_module(module: &Arc<dyn LoadedModule>) -> Result<&CpuModule> {
    module.as_any().downcast_ref().ok_or(DeviceError::Foreign { handle: "module", executor: "cpu" })
}
