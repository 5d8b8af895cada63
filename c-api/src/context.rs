//! Contexts: a device and an engine, with the settings for both.

use std::ffi::{CString, c_char, c_int};
use std::sync::OnceLock;

use pushgate::settings::Key;
use pushgate::{Context, Counters, Membership, Settings, Step, UniqueId};

use crate::arguments::{Options, Out, bytes_mut, flags, options, text, values};
use crate::boundary::{Failure, Result, call};
use crate::codes::*;
use crate::table::{self, Object};

/// The interface that this header describes: its major number above bit 16, its minor number below. Programs that were built
/// for a minor number run with every later one of the same major number; as long as the major number is 0, a new minor number
/// is a new interface, with a new name of the library.
pub const PUSHGATE_INTERFACE: u32 = 2;

/// Take only what `settings` says, and defaults: neither the settings file nor the environment.
pub const PUSHGATE_CONTEXT_DEFAULTS_ONLY: u32 = 1;
/// Choose the GPU and the core of the proxy's thread by this process's number among the ranks of its host, as the launcher
/// tells it.
pub const PUSHGATE_CONTEXT_FOR_RANK: u32 = 2;

/// The context's kernels run on the CPU.
pub const PUSHGATE_DEVICE_CPU: u32 = 1;
/// The context's kernels run on a GPU.
pub const PUSHGATE_DEVICE_CUDA: u32 = 2;

/// A device with its engine. Any thread may use one. Everything that is made with a context works only in the process that
/// made the context: in a child of fork calls return PUSHGATE_E_FORKED.
pub struct pushgate_context;

/// A setting by its name, as docs/operations.md lists them: `qp`, `window-size` or `window_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pushgate_setting {
    /// The name.
    pub name: *const c_char,
    /// The value, as text.
    pub value: *const c_char,
}

/// Options of a context. Members that are 0 mean the default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pushgate_context_options {
    /// sizeof(struct pushgate_context_options).
    pub size: usize,
    /// `settings_count` settings, which win over variables and the settings file. Of two with one name the last one counts.
    pub settings: *const pushgate_setting,
    /// How many.
    pub settings_count: usize,
    /// PUSHGATE_CONTEXT_*.
    pub flags: u32,
    /// The GPU, from 0. Has no effect on the CPU, nor with PUSHGATE_CONTEXT_FOR_RANK.
    pub device_index: u32,
}

// SAFETY: pointers and integers, 8 + 8 + 8 + 4 + 4 bytes without padding, the size first.
unsafe impl Options for pushgate_context_options {
    const LEAST: usize = 32;
}
const _: () = assert!(size_of::<pushgate_context_options>() == 32);

/// A count of the engine, by its name.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pushgate_counter {
    /// Valid for ever.
    pub name: *const c_char,
    /// Counts only grow.
    pub value: u64,
}

/// Names a job and where its ranks meet. Rank 0's process makes it, and the program hands it to the other ranks. It is a
/// password: who has it can be a rank. It serves for one communicator.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pushgate_unique_id {
    /// What travels.
    pub bytes: [u8; 128],
}
const _: () = assert!(UniqueId::BYTES == 128);

impl Object for Context {
    type Handle = pushgate_context;
    const NAME: &'static str = "context";
}

/// The release of the library, as in `0.1.0 (commit 0123456789ab)`. Never NULL; the text is valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn pushgate_version() -> *const c_char {
    static VERSION: OnceLock<CString> = OnceLock::new();
    VERSION.get_or_init(|| CString::new(pushgate::VERSION).unwrap_or_default()).as_ptr()
}

/// The PUSHGATE_INTERFACE of the library that the program runs with.
#[unsafe(no_mangle)]
pub extern "C" fn pushgate_interface() -> u32 {
    PUSHGATE_INTERFACE
}

/// Opens the device and starts the engine, or joins the proxy's process.
///
/// The call reads the environment: no other thread changes it meanwhile, as by setenv.
///
/// @param options  NULL: the settings of the settings file and of the environment.
/// @param context  The result; NULL after an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_context_create(
    options: *const pushgate_context_options,
    context: *mut *mut pushgate_context,
) -> c_int {
    call(|| {
        // SAFETY: the header's rules for pointers, which the program keeps.
        let (out, given) = unsafe { (Out::handle("context", context)?, self::options("options", options)?) };
        let (mut wanted, mut settings, mut device_index) = (0, Vec::new(), 0);
        if let Some(given) = given {
            flags("flags", given.flags, PUSHGATE_CONTEXT_DEFAULTS_ONLY | PUSHGATE_CONTEXT_FOR_RANK)?;
            (wanted, device_index) = (given.flags, given.device_index);
            // SAFETY: as above.
            for setting in unsafe { values("settings", given.settings, given.settings_count)? } {
                // SAFETY: as above.
                settings.push(unsafe {
                    (text("settings.name", setting.name)?, text("settings.value", setting.value)?)
                });
            }
        }
        let defaults = wanted & PUSHGATE_CONTEXT_DEFAULTS_ONLY != 0;
        let mut all = if defaults { Settings::default() } else { Settings::load()? };
        for (name, value) in settings {
            all.set(name, value)?;
        }
        let builder = Context::builder().settings(all.clone()).device_index(device_index);
        let membership = match wanted & PUSHGATE_CONTEXT_FOR_RANK {
            0 => None,
            _ => Membership::of_process(&all)?,
        };
        let builder = match &membership {
            Some(membership) => builder.for_rank(membership),
            None => builder,
        };
        out.put(table::open(builder.build()?));
        Ok(())
    })
}

/// Closes a context that nothing uses any more. NULL is no error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_context_close(context: *mut pushgate_context) -> c_int {
    call(|| table::close::<Context>(context))
}

/// The kind of device: PUSHGATE_DEVICE_CPU or PUSHGATE_DEVICE_CUDA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_context_device(
    context: *const pushgate_context,
    device: *mut u32,
) -> c_int {
    call(|| {
        let context = table::get::<Context>(context)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let out = unsafe { Out::new("device", device)? };
        out.put(if context.device() == "cpu" { PUSHGATE_DEVICE_CPU } else { PUSHGATE_DEVICE_CUDA });
        Ok(())
    })
}

/// Says which device it is and why it was chosen.
///
/// @param buffer  Gets the text, cut to `size` - 1 bytes, and a NUL. May be NULL with a size of 0.
/// @param needed  Gets the whole text's length with its NUL. May be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_context_describe(
    context: *const pushgate_context,
    buffer: *mut c_char,
    size: usize,
    needed: *mut usize,
) -> c_int {
    call(|| {
        let context = table::get::<Context>(context)?;
        let said = format!("{}; {}", context.describe(), context.why());
        // SAFETY: the header's rules for pointers, which the program keeps.
        unsafe { put_text(&said, buffer, size, needed) }
    })
}

/// The value of a setting of a context, as text that a `pushgate_setting` takes. The text is put as by
/// pushgate_context_describe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_context_setting(
    context: *const pushgate_context,
    name: *const c_char,
    buffer: *mut c_char,
    size: usize,
    needed: *mut usize,
) -> c_int {
    call(|| {
        let context = table::get::<Context>(context)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let name = unsafe { text("name", name)? };
        let unknown =
            |why: &str| Failure::new(PUSHGATE_E_UNKNOWN_SETTING, format!("unknown setting `{name}`: {why}"));
        let key = Key::of(name).ok_or_else(|| unknown("`pushgate config` lists the settings"))?;
        if key.is_plugins() {
            return Err(unknown("the NCCL plugin alone has it"));
        }
        // SAFETY: as above.
        unsafe { put_text(&context.settings().text(key), buffer, size, needed) }
    })
}

/// Puts a text into a program's buffer.
///
/// # Safety
/// As [`bytes_mut`] and [`Out::new`].
unsafe fn put_text(text: &str, buffer: *mut c_char, size: usize, needed: *mut usize) -> Result<()> {
    // SAFETY: the caller's promise.
    let (into, needed) = unsafe {
        let needed = if needed.is_null() { None } else { Some(Out::new("needed", needed)?) };
        (bytes_mut("buffer", buffer.cast(), size)?, needed)
    };
    if let Some(room) = into.len().checked_sub(1) {
        let mut length = text.len().min(room);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        into[..length].copy_from_slice(&text.as_bytes()[..length]);
    }
    if let Some(needed) = needed {
        needed.put(text.len() + 1);
    }
    Ok(())
}

/// Makes a pass over the queue pairs, where this program drives the engine (`drive = caller`); else nothing is to be done. Call
/// it in each loop that waits for something of a queue pair.
///
/// @param busy  Gets 1 if there was something to do, else 0. May be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_context_drive(context: *const pushgate_context, busy: *mut u32) -> c_int {
    call(|| {
        let context = table::get::<Context>(context)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let out = if busy.is_null() { None } else { Some(unsafe { Out::new("busy", busy)? }) };
        let step = context.drive()?;
        if let Some(out) = out {
            out.put(u32::from(step == Step::Spin));
        }
        Ok(())
    })
}

/// Counts of the context's engine, all of one moment, in an order that is always the same within a process. docs/operations.md
/// says what each counts.
///
/// @param counters  Gets the first `capacity` counts. May be NULL with a capacity of 0.
/// @param count     Gets how many there are. May be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_context_counters(
    context: *const pushgate_context,
    counters: *mut pushgate_counter,
    capacity: usize,
    count: *mut usize,
) -> c_int {
    call(|| {
        let context = table::get::<Context>(context)?;
        if counters.is_null() && capacity > 0 {
            return Err(Failure::argument("counters", format_args!("NULL, expected room for {capacity}")));
        }
        // SAFETY: the header's rules for pointers, which the program keeps.
        let count = if count.is_null() { None } else { Some(unsafe { Out::new("count", count)? }) };
        if !counters.is_aligned() {
            return Err(Failure::argument("counters", "it is not aligned"));
        }
        let counted = context.counters()?;
        let names = counter_names();
        for (i, ((_, value), name)) in counted.iter().zip(names).take(capacity).enumerate() {
            let counter = pushgate_counter { name: name.as_ptr(), value };
            // SAFETY: not NULL and aligned, checked above; there are `capacity` places, by the header's rules.
            unsafe { counters.add(i).write(counter) };
        }
        if let Some(count) = count {
            count.put(names.len());
        }
        Ok(())
    })
}

/// The counters' names as C has texts.
fn counter_names() -> &'static [CString] {
    static NAMES: OnceLock<Vec<CString>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let names = Counters::default();
        names.iter().map(|(name, _)| CString::new(name).unwrap_or_default()).collect()
    })
}

/// Makes an id, and opens the socket at which rank 0 meets the others. Call this in rank 0's process; it then joins by
/// pushgate_comm_connect_id, as every other rank does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pushgate_unique_id_create(
    context: *const pushgate_context,
    id: *mut pushgate_unique_id,
) -> c_int {
    call(|| {
        let context = table::get::<Context>(context)?;
        // SAFETY: the header's rules for pointers, which the program keeps.
        let out = unsafe { Out::new("id", id)? };
        out.put(pushgate_unique_id { bytes: UniqueId::new(&context)?.to_bytes() });
        Ok(())
    })
}
