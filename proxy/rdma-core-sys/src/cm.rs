//! librdmacm, opened at run time beside libibverbs: [`open_cm`] gives the process's [`Cm`].

use std::net::SocketAddr;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{Cm, with_source};

/// The name under which [`open_cm`] looks for the library.
pub const CM_LIBRARY: &str = "librdmacm.so.1";

/// Linux's `struct sockaddr`, which the library is handed through pointers alone.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct sockaddr {
    /// AF_INET or AF_INET6.
    pub sa_family: u16,
    /// What the family says.
    pub sa_data: [u8; 14],
}

/// Linux's `struct sockaddr_storage`: room for an address of any family.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct sockaddr_storage(pub [u8; 128]);

impl From<SocketAddr> for sockaddr_storage {
    fn from(address: SocketAddr) -> Self {
        let mut bytes = [0; 128];
        let port = address.port().to_be_bytes();
        bytes[2..4].copy_from_slice(&port);
        match address {
            SocketAddr::V4(v4) => {
                bytes[..2].copy_from_slice(&2u16.to_ne_bytes());
                bytes[4..8].copy_from_slice(&v4.ip().octets());
            }
            SocketAddr::V6(v6) => {
                bytes[..2].copy_from_slice(&10u16.to_ne_bytes());
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            }
        }
        sockaddr_storage(bytes)
    }
}

/// Why there is no [`Cm`]. Each message ends with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CmOpenError {
    /// The library does not exist or can't be loaded.
    #[error(
        "cannot open {library}, the library of RDMA connections: {cause}; install the package librdmacm1, or \
         set rdma-cm = off where the RDMA device does not need it"
    )]
    Library {
        /// The name or path that was tried.
        library: String,
        /// The loader's message.
        cause: String,
    },
    /// The library lacks a function.
    #[error("{library} lacks the function {symbol}: {cause}; install rdma-core's own (package librdmacm1)")]
    Symbol {
        /// The name or path of the library.
        library: String,
        /// The first function that it lacks.
        symbol: &'static str,
        /// The loader's message.
        cause: String,
    },
}

/// Opens [`CM_LIBRARY`] on the first call; later calls return what the first one returned, also if that was an
/// error. The library is never closed.
pub fn open_cm() -> Result<&'static Cm, CmOpenError> {
    static OPENED: OnceLock<Result<Cm, CmOpenError>> = OnceLock::new();
    // SAFETY: librdmacm has no constructors that require anything of their caller, and keeps the types of its
    // functions as long as its name ends in .so.1.
    let opened = OPENED.get_or_init(|| unsafe { load_cm(CM_LIBRARY) });
    opened.as_ref().map_err(Clone::clone)
}

/// Opens librdmacm by another name or path. Callers of [`open_cm`] do not see it.
///
/// # Safety
///
/// The library's constructors run. Those of its functions that are called later have the types that rdma_cma.h
/// declares.
pub unsafe fn load_cm(library: &str) -> Result<Cm, CmOpenError> {
    // SAFETY: the caller promises the constructors and the types.
    let opened =
        unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL).and_then(|it| Cm::from_library(it)) };
    let cm = opened
        .map_err(|error| CmOpenError::Library { library: library.into(), cause: with_source(&error) })?;
    match missing(&cm) {
        Some((symbol, error)) => {
            Err(CmOpenError::Symbol { library: library.into(), symbol, cause: with_source(error) })
        }
        None => Ok(cm),
    }
}

macro_rules! required {
    ($($symbol:ident)*) => {
        /// The functions without which [`open_cm`] fails. Those of rdma-core 24 and later.
        pub const CM_REQUIRED: &[&str] = &[$(stringify!($symbol)),*];

        fn missing(cm: &Cm) -> Option<(&'static str, &libloading::Error)> {
            $(if let Err(error) = &cm.$symbol {
                return Some((stringify!($symbol), error));
            })*
            None
        }
    };
}

required! {
    rdma_accept rdma_ack_cm_event rdma_bind_addr rdma_connect rdma_create_event_channel rdma_create_id
    rdma_destroy_event_channel rdma_destroy_id rdma_disconnect rdma_establish rdma_event_str rdma_get_cm_event
    rdma_get_src_port rdma_init_qp_attr rdma_listen rdma_reject rdma_resolve_addr rdma_resolve_route
    rdma_set_option
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If a function were not in the list, calling it could panic without a warning.
    #[test]
    fn every_function_of_librdmacm_is_required() {
        let text = include_str!("cm_bindings.rs").split("impl Cm {").nth(1).unwrap();
        let names = text.split("pub unsafe fn ").skip(1).map(|rest| rest.split(['(', '<']).next().unwrap());
        let mut bound: Vec<_> = names.filter(|name| name.starts_with("rdma_")).collect();
        let mut known = CM_REQUIRED.to_vec();
        bound.sort();
        known.sort();
        assert_eq!(bound, known);
    }

    #[test]
    fn a_librdmacm_that_is_not_there_is_a_sentence_with_the_remedy() {
        // SAFETY: there is no such library.
        let error = unsafe { load_cm("librdmacm-none.so.1") }.err().unwrap().to_string();
        assert!(
            error.starts_with("cannot open librdmacm-none.so.1") && error.contains("librdmacm1"),
            "{error}"
        );
    }

    #[test]
    fn an_address_is_laid_out_as_c_has_it() {
        let v4 = sockaddr_storage::from("10.1.2.3:258".parse::<SocketAddr>().unwrap()).0;
        assert_eq!(v4[..8], [2, 0, 1, 2, 10, 1, 2, 3]);
        let v6 = sockaddr_storage::from("[::1]:258".parse::<SocketAddr>().unwrap()).0;
        assert_eq!((&v6[..4], v6[23]), (&[10, 0, 1, 2][..], 1));
    }
}
