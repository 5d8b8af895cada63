//! Opening the library: where it is, where it is missing, and where something else has its name.

mod common;

use std::ffi::{CStr, c_int};
use std::path::Path;
use std::process::Command;
use std::ptr;

use pushgate_rdma_core_sys::*;

const ENOSYS: c_int = 38;
/// Set when a test runs this binary again.
const CHILD: &str = "OPEN_LIBIBVERBS_HERE";

#[test]
fn where_the_library_is_devices_can_be_listed() {
    let verbs = match open() {
        Ok(verbs) => verbs,
        Err(error @ OpenError::Library { .. }) => return pushgate_tests::skip(&error.to_string()),
        Err(error) => panic!("{error}"),
    };
    assert!(ptr::eq(verbs, open().unwrap()), "opened once");
    let mut count = -1;
    // SAFETY: the list is freed once, after the names have been read.
    unsafe {
        let list = verbs.ibv_get_device_list(&mut count);
        if list.is_null() {
            // The error of a kernel without the RDMA modules.
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(ENOSYS));
            return;
        }
        for index in 0..count as usize {
            let name = CStr::from_ptr(verbs.ibv_get_device_name(*list.add(index)));
            assert!(!name.is_empty());
        }
        assert!((*list.add(count as usize)).is_null());
        verbs.ibv_free_device_list(list);
    }
}

#[test]
fn the_library_names_what_it_reports() {
    let Ok(verbs) = open() else {
        return pushgate_tests::skip(&open().err().unwrap().to_string());
    };
    // SAFETY: the functions return literals, also for values that they do not know.
    let (error, unknown, event, port) = unsafe {
        (
            CStr::from_ptr(verbs.ibv_wc_status_str(ibv_wc_status::IBV_WC_WR_FLUSH_ERR)),
            CStr::from_ptr(verbs.ibv_wc_status_str(ibv_wc_status(9999))),
            CStr::from_ptr(verbs.ibv_event_type_str(ibv_event_type::IBV_EVENT_QP_FATAL)),
            CStr::from_ptr(verbs.ibv_port_state_str(ibv_port_state::IBV_PORT_ACTIVE)),
        )
    };
    assert!(error.to_string_lossy().contains("Flushed"), "{error:?}");
    assert!(!unknown.is_empty() && !event.is_empty());
    assert!(port.to_string_lossy().eq_ignore_ascii_case("active"), "{port:?}");
}

/// The error, which must exist and must end with what to install.
fn error_of(library: &str) -> String {
    // SAFETY: there is no such library, or it is ours and none of its functions is called.
    let error = unsafe { load(library) }.err().unwrap().to_string();
    assert!(error.contains("libibverbs1") && error.contains("ibverbs-providers"), "{error}");
    error
}

#[test]
fn a_library_that_is_not_there_is_a_sentence() {
    let error = error_of("libpushgate-none.so.1");
    assert!(error.starts_with("cannot open libpushgate-none.so.1, the library of RDMA verbs: "), "{error}");
    assert!(error.contains("No such file"), "{error}");
}

/// A library with the required functions except one, by its index. `None`, and a skip, without cc.
fn stub(name: &str, without: &str) -> Option<String> {
    if let Some(reason) = common::missing(false) {
        pushgate_tests::skip(&format!("no library to try can be made: {reason}"));
        return None;
    }
    let functions = REQUIRED.iter().filter(|function| **function != without);
    let text: String = functions.map(|function| format!("void {function}(void) {{}}\n")).collect();
    // The functions are never called, so their types do not matter.
    Some(common::shared_object(name, &text, &[]).to_str().unwrap().into())
}

#[test]
fn a_function_that_is_missing_is_named() {
    for without in ["ibv_get_device_list", "ibv_query_qp", "ibv_node_type_str"] {
        let Some(library) = stub(&format!("without-{without}.so"), without) else { return };
        let error = error_of(&library);
        assert!(error.starts_with(&format!("{library} lacks the function {without}: ")), "{error}");
        // dlsym's message.
        assert!(error.contains("undefined symbol"), "{error}");
    }
}

#[test]
fn a_library_without_the_optional_functions_opens() {
    let Some(library) = stub("required.so", "") else { return };
    // SAFETY: our own library; none of its functions is called.
    let verbs = unsafe { load(&library) }.unwrap();
    assert!(verbs._ibv_query_gid_ex.is_err());
    assert!(verbs.ibv_reg_mr_iova2.is_err());
    assert!(verbs.ibv_reg_dmabuf_mr.is_err());
}

/// Not a test by itself: the next tests run it in a process that finds another library.
#[test]
#[ignore = "other tests start this in processes of their own"]
fn child() {
    assert!(std::env::var_os(CHILD).is_some(), "no test by itself");
    let (first, second) = (open(), open());
    assert_eq!(first.as_ref().err(), second.as_ref().err(), "the first answer stays");
    println!("said: {}", first.err().map_or("opened".into(), |error| error.to_string()));
}

/// What [`open`] returns in a process for which the library lies in `folder`.
fn said_with(folder: &Path) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", folder);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.lines().find_map(|line| line.split_once("said: ")).unwrap().1.to_string()
}

#[test]
fn open_says_what_is_wrong_with_the_library_it_finds() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("broken");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(LIBRARY), "no library\n").unwrap();
    let said = said_with(&folder);
    assert!(said.starts_with("cannot open libibverbs.so.1, the library of RDMA verbs: "), "{said}");
    assert!(said.contains("file too short") && said.contains("ibverbs-providers"), "{said}");

    let Some(library) = stub("incomplete/libibverbs.so.1", "ibv_modify_qp") else { return };
    let said = said_with(Path::new(&library).parent().unwrap());
    assert!(said.starts_with("libibverbs.so.1 lacks the function ibv_modify_qp: "), "{said}");

    let Some(library) = stub("complete/libibverbs.so.1", "") else { return };
    assert_eq!(said_with(Path::new(&library).parent().unwrap()), "opened");
}
