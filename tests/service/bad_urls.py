"""Ways to write a host that is not allowed, or an allowed one oddly, and addresses that nobody is to dial."""

from __future__ import annotations

# Port 1 stands for the hostile server's; every name and number here leads to that server if anybody looks it up.
FORMS = (
    *("http://2130706433:1/", "http://0x7f.1:1/", "http://0177.0.0.1:1/", "http://127.1:1/", "http://0:1/"),
    *("http://127.0.0.1.:1/", "http://127.000.000.001:1/", "http://127.0.0.1%00:1/", "http://127.0.0.2:1/"),
    *("http://[::ffff:127.0.0.1]:1/", "http://[::127.0.0.1]:1/", "http://[64:ff9b::7f00:1]:1/"),
    *("http://[2002:7f00:1::]:1/", "http://[::1%25lo]:1/", "http://[::]:1/", "http://::1:1/", "http://[::1:1/"),
    *("http://[images.test]:1/", "http://\uff11\uff12\uff17.0.0.1:1/", "http://127\u30020\u30020\u30021:1/"),
    *("http://im\u00adages.test:1/", "http://\uff49mages.test:1/", "http://images.te\u017ft:1/"),
    *("http://im\u0430ges.test:1/", "http://images\uff0etest:1/", "http://xn--images-.test:1/"),
    *("http://LOCALHOST:1/", "http://user:word@images.test:1/", "http://@images.test:1/"),
    *("http://images.test:80@127.0.0.1:1/", "http://images.test\\@127.0.0.1:1/", "http://127.0.0.1\\@images.test:1/"),
    *("http:/images.test:1/", "http:images.test:1/", "http:///images.test:1/", "//images.test:1/", "images.test:1/"),
    *("", "http://", "http://:1/", "http://images.test:/", "http://images.test:1/\r\nX: y"),
    *("http://images.test\t:1/", "http://images.test:1/ HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    *("http://images.test:1/\0", "http://images.test:1/a b", " http://images.test:1/", "ht\ntp://images.test:1/"),
    *("http://images.test:1#@127.0.0.1:1/", "http://images.test:1/good.png#x", "http://images.test.:1/"),
    *("http://images..test:1/", "http://images.test%2e:1/", "http://%69mages.test:1/"),
    *("http://images.test.evil.test:1/", "http://eviloutside.test:1/", "http://.outside.test:1/"),
    *("http://*.outside.test:1/", "http://*:1/", "http://images.test:+1/", "http://images.test:01/"),
    *("http://images.test:1:1/", "http://images.test:99999/", "http://images.test:8/", "http://127.0.0.1/"),
    *("https://metadata.test:80/", "http://169.254.169.254/", "ftp://images.test:1/", "file:///etc/passwd"),
    *("data:image/png;base64,AAAA", "http+unix://images.test:1/", "http://images.test:1/%zz"),
    *("http://images.test:1/\u00e4", "http://images.test:1/\x7f", "http://images.test:1/<x>"),
    *("http://images.test:1,127.0.0.1:1/", "http://images.test:1 http://127.0.0.1:1/", "http://images.test:1;/"),
)


# All of these reach this machine where they reach anything.
NEARBY = (
    *("127.0.0.1", "127.0.0.2", "127.255.255.254", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1", "::ffff:7f00:1"),
    *("::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "fe80::1", "fec0::1"),
)
FORBIDDEN = (
    *NEARBY,
    *("10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.0.1", "100.64.0.1", "0.1.2.3", "192.0.0.1", "192.0.0.9"),
    *("192.0.0.192", "192.0.2.1", "192.88.99.1", "198.18.0.1"),
    *("198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254"),
    *("::ffff:8.8.8.8", "::8.8.8.8", "64:ff9b::808:808", "64:ff9b:1::808:808", "2002:808:808::1"),
    *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1"),
    *("fc00::1", "fd12::1", "ff02::1", "ff0e::1", "100::1", "5f00::1", "4000::1", "::2"),
)
OWN = (  # a host that may be private may have these
    *("127.0.0.1", "127.0.0.2", "127.255.255.254", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.0.1"),
    *("100.64.0.1", "::1", "fc00::1", "fd12::1"),
)
PUBLIC = ("8.8.8.8", "1.1.1.1", "93.184.216.34", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00:1450::1")
