//! The files that bindgen makes: driver-shim/abi/src/abi.rs from abi.h, uapi.rs from the module's
//! header, and the bindings of libibverbs and librdmacm from verbs.h and rdma_cma.h; and the header of the C API, which
//! cbindgen makes from its Rust sources. The result depends neither on libclang's version nor on the caller's rustfmt settings,
//! so it can be compared byte for byte.

use crate::paths::Paths;
#[cfg(not(feature = "bindings"))]
use crate::process;
use crate::progress::Guard;
use anyhow::Result;
use std::fs;
use std::path::PathBuf;

/// The rdma-core whose verbs.h the committed bindings are made from: Debian 12's. Another release
/// has other declarations, so there would be nothing to compare with.
const RDMA_CORE: &str = "44";

/// Writes the files, or compares them with `check`. This xtask has no bindgen; it builds an xtask
/// that has bindgen and runs that.
#[cfg(not(feature = "bindings"))]
pub fn run(paths: &Paths, check: bool, guard: Guard) -> Result<()> {
    let mut command = process::cargo(&paths.root);
    command.args(["run", "--package", "xtask", "--features", "bindings", "--", "bindings"]);
    if check {
        command.arg("--check");
    }
    process::run(command, guard)
}

/// Writes the files, or compares them with `check`.
#[cfg(feature = "bindings")]
pub fn run(paths: &Paths, check: bool, _: Guard) -> Result<()> {
    made::one(paths, check, &made::ABI)?;
    made::one(paths, check, &made::UAPI)?;
    made::c_header(paths, check)?;
    match without_verbs() {
        Some(reason) => println!("SKIPPED: {reason}"),
        None => {
            made::one(paths, check, &made::VERBS)?;
            made::one(paths, check, &made::CM)?;
        }
    }
    Ok(())
}

/// Why the bindings of libibverbs and librdmacm can't be made on this machine, with the remedy; `None` if they
/// can.
pub fn without_verbs() -> Option<String> {
    let found = match installed() {
        None => "its headers are not installed here".to_string(),
        Some(version) if of_rdma_core(&version) == Some(RDMA_CORE) => {
            match std::path::Path::new("/usr/include/rdma/rdma_cma.h").exists() {
                true => return None,
                false => "the header of librdmacm is not installed here".to_string(),
            }
        }
        Some(version) => format!("here is libibverbs {version}"),
    };
    Some(format!(
        "the bindings of libibverbs and librdmacm are made from rdma-core {RDMA_CORE}, and {found}; \
         on Debian 12 run: sudo apt-get install -y --no-install-recommends libibverbs-dev librdmacm-dev"
    ))
}

/// The version of the installed headers. The headers do not state it, but the pkg-config
/// description that is packaged with them does; reading it as text needs no pkg-config.
fn installed() -> Option<String> {
    let below = fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
    let folders = ["/usr/lib", "/usr/lib64"].map(PathBuf::from).into_iter().chain(below);
    let texts = folders.map(|folder| fs::read_to_string(folder.join("pkgconfig/libibverbs.pc")));
    let text = texts.flatten().next()?;
    Some(text.lines().find_map(|line| line.strip_prefix("Version:"))?.trim().to_string())
}

/// rdma-core's own version, as part of the library's version: 44 in 1.14.44.0.
fn of_rdma_core(version: &str) -> Option<&str> {
    version.split('.').nth(2)
}

#[cfg(feature = "bindings")]
mod made {
    use super::*;
    use crate::files;
    use anyhow::Context;
    use bindgen::Builder;

    /// A committed file that bindgen makes.
    pub struct Made {
        /// Path from the repository root; `header` too, if it is one of ours.
        rust: &'static str,
        header: &'static str,
        builder: fn(&Paths, &Made) -> Result<Builder>,
    }

    pub const ABI: Made = Made {
        rust: "driver-shim/abi/src/abi.rs",
        header: "driver-shim/include/pushgate/abi.h",
        builder: |paths, made| {
            Ok(bindgen::builder()
                .header(paths.root.join(made.header).to_str().context("the repository's path is not UTF-8")?)
                .allowlist_file(r".*/pushgate/abi\.h")
                .raw_line("// Generated from include/pushgate/abi.h by `cargo xtask bindings`; do not edit."))
        },
    };

    pub const UAPI: Made = Made {
        rust: "driver-shim/src/uapi.rs",
        header: "driver-shim/include/uapi/pushgate.h",
        builder: |paths, made| {
            Ok(bindgen::builder()
                .header(paths.root.join(made.header).to_str().context("the repository's path is not UTF-8")?)
                .allowlist_file(r".*/uapi/pushgate\.h")
                // The kernel's own names for fixed widths; Rust would call C's types c_uint and so
                // on.
                .blocklist_type("__[us](8|16|32|64)")
                .raw_line("// Generated from include/uapi/pushgate.h by `cargo xtask bindings`; do not edit.")
                .raw_line("")
                .raw_line("type __u32 = u32;")
                .raw_line("type __s32 = i32;")
                .raw_line("type __u64 = u64;"))
        },
    };

    pub const VERBS: Made = Made {
        rust: "proxy/rdma-core-sys/src/bindings.rs",
        header: "infiniband/verbs.h",
        builder: |_, made| {
            let mut builder = bindgen::builder()
                .header_contents("verbs-wrapper.h", &format!("#include <{}>\n", made.header))
                // Nothing is linked: each function is looked up at run time, and one that an older
                // library lacks is an Err in its field.
                .dynamic_library_name("Verbs")
                .dynamic_link_require_all(false)
                // A library newer than these headers may return a value that they don't name. In a
                // Rust enum that would be undefined behaviour.
                .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: false })
                .layout_tests(true)
                // glibc's internals; the crate has them as bytes.
                .blocklist_type("_*pthread_.*|__atomic_wide_counter.*")
                .raw_line(format!(
                    "// Generated from <{}> of rdma-core {RDMA_CORE} by `cargo xtask bindings`; do not edit.",
                    made.header
                ))
                .raw_line("")
                .raw_line("use crate::{pthread_cond_t, pthread_mutex_t};");
            for function in FUNCTIONS {
                builder = builder.allowlist_function(function);
            }
            for name in TYPES {
                builder = builder.allowlist_type(name);
            }
            for name in FLAGS {
                builder = builder.allowlist_type(name).bitfield_enum(name);
            }
            for name in OPAQUE {
                builder = builder.opaque_type(name);
            }
            Ok(builder)
        },
    };

    pub const CM: Made = Made {
        rust: "proxy/rdma-core-sys/src/cm_bindings.rs",
        header: "rdma/rdma_cma.h",
        builder: |_, made| {
            let mut builder = bindgen::builder()
                .header_contents("cm-wrapper.h", &format!("#include <{}>\n", made.header))
                .dynamic_library_name("Cm")
                .dynamic_link_require_all(false)
                .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: false })
                .layout_tests(true)
                // Those of verbs.h, made beside, and glibc's internals.
                .blocklist_type("_*ibv_.*|_compat_ibv_.*|_*pthread_.*|__atomic_wide_counter.*|__be.*|__u.*")
                // Of addresses the library takes pointers alone.
                .blocklist_type(
                    "rdma_addr.*|rdma_ib_addr|sockaddr.*|sa_family_t|in6?_addr.*|in_port_t|_*u?int.*_t",
                )
                .opaque_type("rdma_route|rdma_ud_param")
                .raw_line(format!(
                    "// Generated from <{}> of rdma-core {RDMA_CORE} by `cargo xtask bindings`; do not edit.",
                    made.header
                ))
                .raw_line("")
                .raw_line("use crate::bindings::*;")
                .raw_line("use crate::sockaddr;");
            for function in CM_FUNCTIONS {
                builder = builder.allowlist_function(function);
            }
            Ok(builder)
        },
    };

    /// The functions of librdmacm that are called.
    const CM_FUNCTIONS: &[&str] = &[
        "rdma_accept",
        "rdma_ack_cm_event",
        "rdma_bind_addr",
        "rdma_connect",
        "rdma_create_event_channel",
        "rdma_create_id",
        "rdma_destroy_event_channel",
        "rdma_destroy_id",
        "rdma_disconnect",
        "rdma_establish",
        "rdma_event_str",
        "rdma_get_cm_event",
        "rdma_get_src_port",
        "rdma_init_qp_attr",
        "rdma_listen",
        "rdma_reject",
        "rdma_resolve_addr",
        "rdma_resolve_route",
        "rdma_set_option",
    ];

    /// The functions that are called. The crate requires all of them except those that it lists as
    /// optional; a test of the crate finds a function that is in neither group.
    const FUNCTIONS: &[&str] = &[
        "_ibv_query_gid_ex",
        "ibv_ack_async_event",
        "ibv_ack_cq_events",
        "ibv_alloc_pd",
        "ibv_close_device",
        "ibv_create_comp_channel",
        "ibv_create_cq",
        "ibv_create_qp",
        "ibv_dealloc_pd",
        "ibv_dereg_mr",
        "ibv_destroy_comp_channel",
        "ibv_destroy_cq",
        "ibv_destroy_qp",
        "ibv_event_type_str",
        "ibv_fork_init",
        "ibv_free_device_list",
        "ibv_get_async_event",
        "ibv_get_cq_event",
        "ibv_get_device_guid",
        "ibv_get_device_list",
        "ibv_get_device_name",
        "ibv_is_fork_initialized",
        "ibv_modify_qp",
        "ibv_node_type_str",
        "ibv_open_device",
        "ibv_port_state_str",
        "ibv_query_device",
        "ibv_query_gid",
        "ibv_query_pkey",
        "ibv_query_port",
        "ibv_query_qp",
        "ibv_reg_dmabuf_mr",
        "ibv_reg_mr",
        "ibv_reg_mr_iova2",
        "ibv_wc_status_str",
    ];

    /// Types that the signatures above don't mention.
    const TYPES: &[&str] = &["verbs_context", "ibv_gid_type", "ibv_rate"];

    /// Enums whose values are combined with or.
    const FLAGS: &[&str] = &[
        "ib_uverbs_access_flags",
        "ibv_access_flags",
        "ibv_device_cap_flags",
        "ibv_dm_mask",
        "ibv_port_cap_flags",
        "ibv_qp_attr_mask",
        "ibv_send_flags",
        "ibv_wc_flags",
    ];

    /// Types that are used only through pointers, so their fields are not needed.
    const OPAQUE: &[&str] = &[
        "ibv_.*counter.*",
        "ibv_cq_ex",
        "ibv_cq_init_attr_ex",
        "ibv_flow.*",
        "ibv_modify_cq_attr",
        "ibv_mw.*",
        "ibv_ops_wr",
        "ibv_parent_domain_init_attr",
        "ibv_qp_init_attr_ex",
        "ibv_qp_open_attr",
        "ibv_qp_rate_limit_attr",
        "ibv_rwq.*",
        "ibv_srq.*",
        "ibv_td.*",
        "ibv_values_ex",
        "ibv_wq.*",
        "ibv_xrcd.*",
    ];

    /// The sources of the C API, in the order in which the header has them.
    const C_SOURCES: [&str; 11] = [
        "codes",
        "boundary",
        "log",
        "interrupt",
        "context",
        "comm",
        "queue_pair",
        "memory",
        "region",
        "kernel",
        "host",
    ];

    /// pushgate/pushgate.h, from the sources of the C API.
    pub fn c_header(paths: &Paths, check: bool) -> Result<()> {
        let folder = paths.root.join("c-api");
        let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).map_err(anyhow::Error::msg)?;
        let mut builder = cbindgen::Builder::new().with_config(config);
        for source in C_SOURCES {
            builder = builder.with_src(folder.join(format!("src/{source}.rs")));
        }
        let mut text = Vec::new();
        builder.generate().context("cbindgen failed")?.write(&mut text);
        let text = String::from_utf8(text).context("the header is not UTF-8")?;
        let file = "c-api/include/pushgate/pushgate.h";
        files::Made { file, source: "c-api/src", task: "cargo xtask bindings" }.write(
            &paths.root,
            &text,
            check,
        )
    }

    pub fn one(paths: &Paths, check: bool, made: &Made) -> Result<()> {
        let text = generate(paths, made)?;
        let committed = files::Made { file: made.rust, source: made.header, task: "cargo xtask bindings" };
        committed.write(&paths.root, &text, check)
    }

    fn generate(paths: &Paths, made: &Made) -> Result<String> {
        let bindings = (made.builder)(paths, made)?
            .use_core()
            .merge_extern_blocks(true)
            .derive_default(true)
            .rust_target(bindgen::RustTarget::stable(85, 0).map_err(|e| anyhow::anyhow!("{e}"))?)
            .rust_edition(bindgen::RustEdition::Edition2024)
            .disable_header_comment()
            .clang_args(["-x", "c"])
            .formatter(bindgen::Formatter::Rustfmt)
            .rustfmt_configuration_file(Some(paths.root.join("rustfmt.toml")))
            .generate()
            .context("bindgen failed")?;
        // Not to_string(), which leaves the text unformatted when rustfmt fails.
        let mut text = Vec::new();
        bindings.write(Box::new(&mut text)).context("cannot format the bindings with rustfmt")?;
        let mut text = String::from_utf8(text).context("the bindings are not UTF-8")?;
        // bindgen's numbers are x86-64's. Those of structs with glibc's mutex inside differ elsewhere, where the test of C's
        // layouts compares them.
        for name in WITH_MUTEX {
            let head = format!("const _: () = {{\n    [\"Size of {name}\"]");
            text = text.replace(&head, &format!("#[cfg(target_arch = \"x86_64\")]\n{head}"));
        }
        Ok(text)
    }

    const WITH_MUTEX: [&str; 4] = ["ibv_context", "ibv_cq", "ibv_qp", "verbs_context"];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_rdma_core_is_in_that_of_the_library() {
        assert_eq!(of_rdma_core("1.14.44.0"), Some("44"));
        assert_eq!(of_rdma_core("1.14.50.0"), Some("50"));
        assert_eq!(of_rdma_core("44"), None);
    }
}
