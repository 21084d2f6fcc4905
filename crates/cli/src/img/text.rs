//! Sizes, JSON and errors as qemu-img prints them.

use serde::Serialize;
use stillpoint_io::{Error, Kind};

use crate::options::Size;

/// A size from the command line: as everywhere, and hexadecimal too.
pub fn parse_size(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok().map(|Size(bytes)| bytes),
    }
}

/// `bytes` in the largest unit of which there is about one at least, with three digits.
pub fn human_size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}B", three_digits(value), UNITS[unit])
}

/// At most three significant digits, without zeros at the end.
fn three_digits(value: f64) -> String {
    let decimals = match value {
        value if value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        value if value >= 0.9995 || value == 0.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false if text == "1000" => "1e+03".to_owned(),
        false => text,
    }
}

/// Prints a value as JSON, indented by four.
pub fn print_json(value: &impl Serialize) {
    let mut bytes = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    value.serialize(&mut serializer).expect("numbers and strings can be written as JSON");
    outln!("{}", String::from_utf8(bytes).expect("JSON is UTF-8"));
}

/// The system's words for an error number.
pub fn system_words(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// Why opening the image called `name` failed, in qemu-img's words.
pub fn reason(name: &str, error: &Error) -> String {
    let file = error.file_name().unwrap_or(name);
    let through = if file == name { "" } else { "Could not open backing file: " };
    match (error.kind(), error.errno()) {
        (Kind::Busy, _) => format!(
            "{through}Failed to get shared \"write\" lock\nIs another process using the image \
             [{file}]?"
        ),
        (_, Some(errno)) => format!("{through}Could not open '{file}': {}", system_words(errno)),
        (_, None) => format!("{through}{}", error.why()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (1024, "1 KiB"),
            (197_120, "192 KiB"),
            (200_704, "196 KiB"),
            (1_234_944, "1.18 MiB"),
            (2_297_856, "2.19 MiB"),
            (1_023_488, "1e+03 KiB"),
            (1_048_576, "1 MiB"),
            (10 << 30, "10 GiB"),
            (1 << 60, "1 EiB"),
        ] {
            assert_eq!(human_size(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn sizes_may_be_hexadecimal() {
        assert_eq!(parse_size("0x100"), Some(256));
        assert_eq!(parse_size("1.5M"), Some(3 << 19));
        for text in ["", "x", "0x", "1e3", "-1"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
