//! Bindings of libibverbs and librdmacm, which are opened at run time: a program that uses this crate starts on a
//! machine without the library, and can say what is missing.
//!
//! * [`open`] gives the process's [`Verbs`]. Its methods are the functions that the library
//!   exports.
//! * The functions that exist only in C's `<infiniband/verbs.h>`, as static inlines or as macros
//!   over an exported function, are functions of this crate: [`ibv_post_send`], [`ibv_query_port`],
//!   [`ibv_alloc_dm`] and so on. If such a function has the name of a method of [`Verbs`]
//!   ([`ibv_query_port`], [`ibv_reg_mr`], [`ibv_reg_dmabuf_mr`]), call the function.
//! * Types, constants and layouts are made by bindgen from the header of rdma-core 44 (Debian 12),
//!   by `cargo xtask bindings`. Later libraries keep that ABI; values that they add to enums are
//!   values here too, only without a name.
//!
//! The names are C's, so that C's manual pages are the reference. Errors are C's too: an errno
//! value returned, or null with errno set (`std::io::Error::last_os_error`).

// C's names, in the whole crate.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

// Made by bindgen: C's manual pages document it.
#[allow(missing_docs, unsafe_op_in_unsafe_fn, clippy::all, clippy::undocumented_unsafe_blocks)]
mod bindings;
mod cm;
// Made by bindgen, as the bindings of libibverbs.
#[allow(missing_docs, unsafe_op_in_unsafe_fn, clippy::all, clippy::undocumented_unsafe_blocks)]
mod cm_bindings;
mod inlines;

pub use bindings::*;
pub use cm::*;
pub use cm_bindings::{
    Cm, rdma_cm_event, rdma_cm_event_type, rdma_cm_id, rdma_conn_param, rdma_event_channel, rdma_port_space,
};
pub use inlines::*;

use std::error::Error;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The name under which [`open`] looks for the library: its ABI's name, which needs no development
/// package.
pub const LIBRARY: &str = "libibverbs.so.1";

/// `ibv_port_attr::link_layer` of a port that does not report one.
pub const IBV_LINK_LAYER_UNSPECIFIED: u8 = 0;
/// `ibv_port_attr::link_layer` of an InfiniBand port: peers are addressed by LID.
pub const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
/// `ibv_port_attr::link_layer` of an Ethernet port (RoCE, iWARP): peers are addressed by GID.
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;

/// glibc's mutex in contexts, queue pairs and completion queues, as bytes: only the library locks it.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct pthread_mutex_t([u8; if cfg!(target_arch = "aarch64") { 48 } else { 40 }]);

/// glibc's condition variable in queue pairs and completion queues, as bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct pthread_cond_t([u8; 48]);

/// Why there is no [`Verbs`]. Each message ends with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The library does not exist or can't be loaded.
    #[error(
        "cannot open {library}, the library of RDMA verbs: {cause}; \
         install the package libibverbs1 and a provider (package ibverbs-providers)"
    )]
    Library {
        /// The name or path that was tried.
        library: String,
        /// The loader's message.
        cause: String,
    },
    /// The library lacks a function of [`REQUIRED`].
    #[error(
        "{library} lacks the function {symbol}: {cause}; \
         install rdma-core's own (package libibverbs1, with ibverbs-providers), or a later one"
    )]
    Symbol {
        /// The name or path of the library.
        library: String,
        /// The first function that it lacks.
        symbol: &'static str,
        /// The loader's message.
        cause: String,
    },
    /// The layouts are those of another architecture.
    #[error(
        "pushgate's bindings of {library} are for Linux on x86-64 and 64-bit ARM alone; \
         use another transport on this machine"
    )]
    Machine {
        /// The name or path that was asked for.
        library: String,
    },
}

/// Opens [`LIBRARY`] on the first call; later calls return what the first one returned, also if
/// that was an error. The library is never closed: providers start threads and keep state that
/// can't be unloaded.
pub fn open() -> Result<&'static Verbs, OpenError> {
    static OPENED: OnceLock<Result<Verbs, OpenError>> = OnceLock::new();
    // SAFETY: libibverbs has no constructors that require anything of their caller. It keeps the
    // types of its functions as long as its name ends in .so.1, and dlsym returns the default
    // version of each function, which is the one that the header describes.
    let opened = OPENED.get_or_init(|| unsafe { load(LIBRARY) });
    opened.as_ref().map_err(Clone::clone)
}

/// Opens a library by another name or path, such as a test's mock. Callers of [`open`] do not see
/// it.
///
/// # Safety
///
/// The library's constructors run. Those of its functions that are called later have the types that
/// verbs.h declares.
pub unsafe fn load(library: &str) -> Result<Verbs, OpenError> {
    // glibc's mutex lies inside ibv_context, so the layout depends on the architecture.
    if !cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))) {
        return Err(OpenError::Machine { library: library.into() });
    }
    // RTLD_NOW: a library that lacks something of its own fails here, not in the middle of a call.
    // SAFETY: the caller promises the constructors and the types.
    let opened =
        unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL).and_then(|it| Verbs::from_library(it)) };
    let verbs =
        opened.map_err(|error| OpenError::Library { library: library.into(), cause: with_source(&error) })?;
    match missing(&verbs) {
        Some((symbol, error)) => {
            Err(OpenError::Symbol { library: library.into(), symbol, cause: with_source(error) })
        }
        None => Ok(verbs),
    }
}

/// The message of a library error with the loader's own text, which libloading's message leaves
/// out.
fn with_source(error: &libloading::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

macro_rules! required {
    ($($symbol:ident)*) => {
        /// The functions without which [`open`] fails: the methods of an opened [`Verbs`] that
        /// never panic. Every libibverbs of the last ten years has them.
        pub const REQUIRED: &[&str] = &[$(stringify!($symbol)),*];

        fn missing(verbs: &Verbs) -> Option<(&'static str, &libloading::Error)> {
            $(if let Err(error) = &verbs.$symbol {
                return Some((stringify!($symbol), error));
            })*
            None
        }
    };
}

required! {
    ibv_get_device_list ibv_free_device_list ibv_get_device_name ibv_get_device_guid
    ibv_open_device ibv_close_device
    ibv_query_device ibv_query_port ibv_query_gid ibv_query_pkey
    ibv_alloc_pd ibv_dealloc_pd ibv_reg_mr ibv_dereg_mr
    ibv_create_comp_channel ibv_destroy_comp_channel
    ibv_create_cq ibv_destroy_cq ibv_get_cq_event ibv_ack_cq_events
    ibv_create_qp ibv_modify_qp ibv_query_qp ibv_destroy_qp
    ibv_get_async_event ibv_ack_async_event
    ibv_fork_init
    ibv_wc_status_str ibv_event_type_str ibv_port_state_str ibv_node_type_str
}

/// The functions that an opened [`Verbs`] may lack. Its methods of these names panic then. Instead,
/// call [`ibv_query_gid_ex`], [`ibv_reg_mr`] and [`ibv_reg_dmabuf_mr`] of this crate, or check the
/// field (`verbs.ibv_reg_dmabuf_mr.is_ok()`).
pub const OPTIONAL: &[&str] =
    &["_ibv_query_gid_ex", "ibv_is_fork_initialized", "ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr"];

#[cfg(test)]
mod tests {
    use super::*;

    /// If a function were in neither list, calling it could panic without a warning.
    #[test]
    fn every_function_is_required_or_optional() {
        let text = include_str!("bindings.rs").split("impl Verbs {").nth(1).unwrap();
        let names = text.split("pub unsafe fn ").skip(1).map(|rest| rest.split(['(', '<']).next().unwrap());
        let mut bound: Vec<_> = names.filter(|name| name.contains("ibv_")).collect();
        let mut known = [REQUIRED, OPTIONAL].concat();
        bound.sort();
        known.sort();
        assert_eq!(bound, known);
    }

    #[test]
    fn the_generated_file_names_no_place_of_the_machine_that_made_it() {
        let text = include_str!("bindings.rs");
        assert!(!text.contains("/usr/") && !text.contains("/home/") && !text.contains("/tmp/"));
    }
}
