//! What `create -o` may say: each option's name, kind and meaning once, for parsing, for the help
//! and for the line that tells what is made.

use super::split_options;
use super::text::parse_size;

/// What values an option takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueKind {
    Text,
    Switch,
    Size,
    Number,
}

/// A value given to an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionValue {
    /// Any text.
    Text(String),
    /// On or off.
    Switch(bool),
    /// A size or another number.
    Number(u64),
}

#[derive(Debug)]
struct Definition {
    name: &'static str,
    kind: ValueKind,
    help: &'static str,
}

const fn define(name: &'static str, kind: ValueKind, help: &'static str) -> Definition {
    Definition { name, kind, help }
}

/// In the order in which they are told.
const QCOW2: &[Definition] = &[
    define("cluster_size", ValueKind::Size, "qcow2 cluster size"),
    define("extended_l2", ValueKind::Switch, "Extended L2 tables"),
    define(
        "preallocation",
        ValueKind::Text,
        "Preallocation mode (allowed values: off, metadata, falloc, full)",
    ),
    define(
        "compression_type",
        ValueKind::Text,
        "Compression method used for image cluster compression",
    ),
    define("size", ValueKind::Size, "Virtual disk size"),
    define("compat", ValueKind::Text, "Compatibility level (v2 [0.10] or v3 [1.1])"),
    define("backing_file", ValueKind::Text, "File name of a base image"),
    define("backing_fmt", ValueKind::Text, "Image format of the base image"),
    define("data_file", ValueKind::Text, "File name of an external data file"),
    define(
        "data_file_raw",
        ValueKind::Switch,
        "The external data file must stay valid as a raw image",
    ),
    define("lazy_refcounts", ValueKind::Switch, "Postpone refcount updates"),
    define("refcount_bits", ValueKind::Number, "Width of a reference count entry in bits"),
];

const RAW: &[Definition] = &[
    define("size", ValueKind::Size, "Virtual disk size"),
    define(
        "preallocation",
        ValueKind::Text,
        "Preallocation mode (allowed values: off, falloc, full)",
    ),
];

/// Options that qemu-img has and this program has not: refused by name, each with its reason.
const REFUSED: &[(&str, &str)] = &[
    ("encryption", "encryption is not supported"),
    ("encrypt.", "encryption is not supported"),
    ("nocow", "turning copy-on-write off is not supported; use chattr +C on the folder"),
    ("extent_size_hint", "extent size hints are not supported; use xfs_io -c extsize"),
];

/// The options of a new image, as given.
#[derive(Debug)]
pub struct CreateOptions {
    definitions: &'static [Definition],
    values: Vec<(&'static str, OptionValue)>,
}

impl CreateOptions {
    /// For a format by name; none if there is no such format.
    pub fn of_format(format: &str) -> Option<CreateOptions> {
        let definitions = match format {
            "qcow2" => QCOW2,
            "raw" => RAW,
            _ => return None,
        };
        Some(CreateOptions { definitions, values: Vec::new() })
    }

    /// Whether a list of options asks for help instead.
    pub fn asks_for_help(list: &str) -> bool {
        split_options(list).iter().any(|(key, _)| matches!(&key[..], "help" | "?" | "list"))
    }

    /// The help.
    pub fn help(&self) -> String {
        let mut definitions: Vec<_> = self.definitions.iter().collect();
        definitions.sort_by_key(|definition| definition.name);
        let mut text = "Supported options:\n".to_owned();
        for Definition { name, kind, help } in definitions {
            let kind = match kind {
                ValueKind::Text => "<str>",
                ValueKind::Switch => "<bool (on/off)>",
                ValueKind::Size => "<size>",
                ValueKind::Number => "<num>",
            };
            text.push_str(&format!("  {:<22} - {help}\n", format!("{name}={kind}")));
        }
        text
    }

    /// Takes a list of options, `key=value,key=value`; later ones override earlier ones.
    pub fn take_list(&mut self, list: &str) -> Result<(), String> {
        for (key, value) in split_options(list) {
            let negated = key.strip_prefix("no").filter(|_| value.is_none());
            let known = |name: &str| self.definitions.iter().find(|known| known.name == name);
            let (definition, value) = match (known(&key), negated.and_then(known)) {
                (Some(definition), _) => (definition, value.unwrap_or_else(|| "on".to_owned())),
                (None, Some(definition)) => (definition, "off".to_owned()),
                (None, None) => match REFUSED.iter().find(|(name, _)| key.starts_with(name)) {
                    Some((_, why)) => return Err(format!("Parameter '{key}': {why}")),
                    None => return Err(format!("Invalid parameter '{key}'")),
                },
            };
            let value = parse_value(definition, value)?;
            self.set(definition.name, value);
        }
        Ok(())
    }

    /// Sets an option of the format; formats without it take no notice.
    pub fn set(&mut self, name: &'static str, value: OptionValue) {
        if self.has(name) {
            self.values.retain(|(other, _)| *other != name);
            self.values.push((name, value));
        }
    }

    /// Sets an option that was not given.
    pub fn set_default(&mut self, name: &'static str, value: OptionValue) {
        if self.value(name).is_none() {
            self.set(name, value);
        }
    }

    /// Whether the format has an option.
    pub fn has(&self, name: &str) -> bool {
        self.definitions.iter().any(|definition| definition.name == name)
    }

    fn value(&self, name: &str) -> Option<&OptionValue> {
        self.values.iter().find(|(other, _)| *other == name).map(|(_, value)| value)
    }

    /// A text, if it was given.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.value(name) {
            Some(OptionValue::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// A switch; off if it was not given.
    pub fn switch(&self, name: &str) -> bool {
        matches!(self.value(name), Some(OptionValue::Switch(true)))
    }

    /// A number, if it was given.
    pub fn number(&self, name: &str) -> Option<u64> {
        match self.value(name) {
            Some(OptionValue::Number(number)) => Some(*number),
            _ => None,
        }
    }

    /// The options with their values, in the order in which they are told.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for definition in self.definitions {
            let Some(value) = self.value(definition.name) else { continue };
            let value = match value {
                OptionValue::Text(text) => text.clone(),
                OptionValue::Switch(on) => if *on { "on" } else { "off" }.to_owned(),
                OptionValue::Number(number) => number.to_string(),
            };
            text.push_str(&format!(" {}={value}", definition.name));
        }
        text
    }
}

fn parse_value(definition: &Definition, value: String) -> Result<OptionValue, String> {
    let name = definition.name;
    match definition.kind {
        ValueKind::Text => Ok(OptionValue::Text(value)),
        ValueKind::Switch => match &value[..] {
            "on" | "yes" | "true" | "y" => Ok(OptionValue::Switch(true)),
            "off" | "no" | "false" | "n" => Ok(OptionValue::Switch(false)),
            _ => Err(format!("Parameter '{name}' expects 'on' or 'off'")),
        },
        ValueKind::Size => parse_size(&value).map(OptionValue::Number).ok_or_else(|| {
            format!(
                "Parameter '{name}' expects a non-negative number below 2^64\nOptional suffix k, \
                 M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\nand exabytes, \
                 respectively."
            )
        }),
        ValueKind::Number => match value.parse() {
            Ok(number) => Ok(OptionValue::Number(number)),
            Err(_) => Err(format!("Parameter '{name}' expects a number")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(list: &str) -> Result<CreateOptions, String> {
        let mut options = CreateOptions::of_format("qcow2").unwrap();
        options.take_list(list).map(|()| options)
    }

    #[test]
    fn options_are_told_in_a_fixed_order() {
        let options = taken("refcount_bits=8,cluster_size=4k,lazy_refcounts,cluster_size=8k");
        let text = options.unwrap().describe();
        assert_eq!(text, " cluster_size=8192 lazy_refcounts=on refcount_bits=8");
        assert_eq!(taken("nolazy_refcounts").unwrap().describe(), " lazy_refcounts=off");
    }

    #[test]
    fn what_cannot_be_taken_is_refused_by_name() {
        for (list, why) in [
            ("nosuch=1", "Invalid parameter 'nosuch'"),
            ("lazy_refcounts=maybe", "Parameter 'lazy_refcounts' expects 'on' or 'off'"),
            ("refcount_bits=1k", "Parameter 'refcount_bits' expects a number"),
            ("encrypt.format=luks", "Parameter 'encrypt.format': encryption is not supported"),
        ] {
            assert_eq!(taken(list).unwrap_err(), why);
        }
        assert!(taken("size=x").unwrap_err().starts_with("Parameter 'size' expects"));
        assert!(CreateOptions::of_format("vmdk").is_none());
        assert!(CreateOptions::asks_for_help("size=1M,?"));
    }
}
