//! NCCL's library and the plugin that it would open. Both are opened here: their constructors run, as
//! they would in a program that uses them.

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

use super::files::names;
use crate::readings::{Nccl, Plugin, Read};

/// The versions of the interface that the plugin has tables of, the newest first.
const TABLES: [(u32, &str); 5] = [
    (12, "ncclNetPlugin_v12"),
    (11, "ncclNetPlugin_v11"),
    (10, "ncclNetPlugin_v10"),
    (9, "ncclNetPlugin_v9"),
    (8, "ncclNetPlugin_v8"),
];

pub fn nccl() -> Nccl {
    let variable = |name: &str| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned());
    let plugin_variable = variable("NCCL_NET_PLUGIN");
    Nccl {
        version: library(),
        plugin: plugin(plugin_variable.as_deref()),
        ref_count: variable("NCCL_NET_PLUGIN_REF_COUNT"),
        plugin_variable,
    }
}

/// Libraries stay open: what they started can't be stopped.
pub(super) fn open(name: &str) -> Result<&'static Library, String> {
    // SAFETY: a library that the user's environment names for NCCL; its constructors are made for
    // being loaded by any program.
    let library = unsafe { Library::open(Some(name), RTLD_LAZY | RTLD_LOCAL) };
    library.map(|l| &*Box::leak(Box::new(l))).map_err(|e| {
        // libloading's own message leaves out what the loader said.
        std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string)
    })
}

/// Whether a library can be opened; a sentence if not.
pub fn opens(name: &str) -> Result<(), String> {
    open(name).map(drop)
}

/// The loader found no such file, as opposed to one that it can't load.
fn not_found(name: &str, error: &str) -> bool {
    error.starts_with(&format!("{name}: cannot open shared object file: No such file"))
}

/// NCCL's library, and the version code that it answers with: by the linker's name, then where NVIDIA's wheels put the
/// file in a Python environment.
pub fn library() -> Read<(u32, String)> {
    const NAME: &str = "libnccl.so.2";
    let env = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let mut sites: Vec<PathBuf> = env("PUSHGATE_PYTHON_SITE").into_iter().collect();
    for lib in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env).map(|root| root.join("lib")) {
        let pythons = names(&lib).into_iter().filter(|n| n.starts_with("python"));
        sites.extend(pythons.map(|n| lib.join(n).join("site-packages")));
    }
    let files = sites.into_iter().map(|s| s.join("nvidia/nccl/lib").join(NAME)).filter(|p| p.exists());
    let names = [NAME.to_string()].into_iter().chain(files.map(|p| p.display().to_string()));
    names.map(|name| library_at(&name)).find(|read| *read != Read::Absent).unwrap_or(Read::Absent)
}

/// NCCL's library of this name or path, and the version code that it answers with.
pub fn library_at(name: &str) -> Read<(u32, String)> {
    let library = match open(name) {
        Ok(library) => library,
        Err(error) if not_found(name, &error) => return Read::Absent,
        Err(error) => return Read::Unreadable(format!("{name} can't be loaded: {error}")),
    };
    // SAFETY: nccl.h: ncclResult_t ncclGetVersion(int *), since 2.0.
    let get = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0") };
    let Ok(get) = get else {
        return Read::Unreadable(format!("{name} has no ncclGetVersion: is it NCCL?"));
    };
    let mut code = 0;
    // SAFETY: the place is ours.
    let result = unsafe { get(&mut code) };
    match u32::try_from(code) {
        Ok(code) if result == 0 && code > 0 => Read::Is((code, name.into())),
        _ => Read::Unreadable(format!("{name}: ncclGetVersion returns {result} and says {code}")),
    }
}

/// NCCL takes a list, each a file's name or the NAME of libnccl-net-NAME.so. Without one, whether the
/// linker would find ours.
fn plugin(variable: Option<&str>) -> Read<Plugin> {
    let list = variable.filter(|v| !v.is_empty()).unwrap_or("pushgate");
    let mut broken = None;
    for entry in list.split(',').map(str::trim).filter(|e| !e.is_empty() && !e.eq_ignore_ascii_case("none")) {
        for file in [entry.to_string(), format!("libnccl-net-{entry}.so")] {
            // The linker would look for a bare word, too; there is no such library.
            if !file.contains(".so") {
                continue;
            }
            match open(&file) {
                Ok(library) => return Read::Is(tables(library, file)),
                Err(error) if not_found(&file, &error) => {}
                Err(error) => broken = broken.or(Some(format!("{file} can't be loaded: {error}"))),
            }
        }
    }
    broken.map_or(Read::Absent, Read::Unreadable)
}

fn tables(library: &Library, file: String) -> Plugin {
    let mut plugin = Plugin { file, ..Plugin::default() };
    for (version, symbol) in TABLES {
        // SAFETY: only the address is taken here.
        let Ok(table) = (unsafe { library.get::<*const *const c_char>(symbol.as_bytes()) }) else { continue };
        plugin.tables.push(version);
        let table: *const *const c_char = *table;
        if plugin.name.is_empty() && !table.is_null() {
            // SAFETY: a table of that name begins with the plugin's name (nccl_net.h, ncclNet_v8_t to
            // v12_t), and the library stays loaded.
            let name = unsafe { *table };
            if !name.is_null() {
                // SAFETY: as NCCL itself reads it.
                plugin.name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
            }
        }
    }
    plugin
}
